// What a story may ask about one image in one model: the numbers of the page's source (served.js says which), and the answer.
import { indexOfHighest } from "./story_measures.js";

export function questions(source, look, about) {
  const forward = (edit = {}) => source.forward(look, edit);
  return {
    about,
    look,
    forward,
    async answer(edit) {
      const { probabilities } = await forward(edit), index = indexOfHighest(probabilities);
      return { index, label: about.labels[index], probability: probabilities[index], probabilities };
    },
    block: (where, edit = {}) => source.block(look, where, edit),
    attention: (layer, edit = {}) => source.attention(look, layer, edit),
    positions: () => source.positions(look),
    similarity: () => source.similarity(look),
    colours: () => source.colours(look),
    fewer: (reducer) => source.fewer(look, reducer),
    reconstruction: (options) => source.reconstruction(look, options),
    sentences: (texts) => source.sentences(look, texts.join("\n")),
  };
}
