// CLIP: images and sentences in one space (arXiv:2103.00020).
import { percent, strongest } from "./draw.js";
import { indexOfHighest, sum } from "./story_measures.js";
import { decimal } from "./story_words.js";

const THINGS = ["cat", "dog", "ship", "frog"];
const sentence = (thing) => `a photo of a ${thing}`;
const WORDING = {
  counts: { en: "So wording counts. When it matters, one takes the mean over many templates.", zh: "可见措辞有影响。要紧的时候，会对许多模板取平均。" },
  not: { en: "To this model the wording makes hardly any difference. To others it does, so one takes the mean over many templates.", zh: "对这个模型，措辞几乎没有影响；对别的模型有，所以会对许多模板取平均。" },
};
const BRIGHT = { en: "Bright: speaks for “{text}”.", zh: "越亮，越支持“{text}”。" };
const caption = (text) => Object.fromEntries(Object.entries(BRIGHT).map(([language, words]) => [language, words.replace("{text}", text)]));

export const story = {
  name: "clip",
  title: { en: "CLIP: images meet words", zh: "CLIP：图片遇见文字" },
  summary: { en: "Classes are sentences, and you write them.", zh: "类别就是句子，由你来写。" },
  needs: { offers: ["sentences"], family: /clip/i }, // SigLIP learns from pairs one by one
  model: { en: "a CLIP", zh: "CLIP" },

  async facts(ask) {
    const answer = await ask.sentences(THINGS.map(sentence)), order = strongest(answer.probability, THINGS.length), [best, second] = order;
    return {
      answer, order, model: ask.about.name, count: THINGS.length, best: answer.texts[best], bestShare: percent(answer.probability[best]), bestCosine: decimal(answer.cosine[best]),
      second: answer.texts[second], secondCosine: decimal(answer.cosine[second]), secondShare: percent(answer.probability[second]), last: answer.texts[order.at(-1)], lastCosine: decimal(answer.cosine[order.at(-1)]), thing: THINGS[best],
    };
  },

  scenes: [
    {
      state: { step: "image", heat: "none" },
      en: "{model} is two networks. One turns an image into a vector, the other a sentence. Both vectors live in the same space, so an image and a sentence can be compared.",
      zh: "{model} 由两个网络组成：一个把图片变成向量，另一个把句子变成向量。两种向量在同一个空间里，所以图片和句子可以直接比较。",
    },
    {
      state: { step: "image", heat: "none" },
      en: "How it learned: from images with captions. In every batch each image is compared with each caption. Its own caption should win against all the others, and each caption's own image too.",
      zh: "它这样学习：用带说明文字的图片。每个批次里，每张图片与每条说明都作比较。自己的那条说明要胜过其他所有说明；反过来，每条说明也要找到自己的图片。",
    },
    {
      state: { step: "image", heat: "none" },
      en: "Compare this image with {count} sentences. The highest cosine: “{best}”, {bestCosine}. The lowest: “{last}”, {lastCosine}.",
      zh: "把这张图片和 {count} 个句子比较。余弦最高的是 “{best}”：{bestCosine}。最低的是 “{last}”：{lastCosine}。",
    },
    {
      facts(_, { answer: { cosine, probability }, order: [a, b] }) {
        const raw = Math.exp(cosine[a]) / sum(cosine.map(Math.exp));
        return { gap: decimal(cosine[a] - cosine[b]), raw: percent(raw), scale: decimal(Math.log(probability[a] / probability[b]) / (cosine[a] - cosine[b]), 1) };
      },
      figure: (_, { answer: { texts, probability }, order }) => [{ scores: order.map((i) => ({ label: texts[i], probability: probability[i] })), caption: { en: "among these sentences", zh: "在这些句子之间" } }],
      state: { step: "image", heat: "none" },
      en: "The next one, “{second}”, is {gap} lower. A softmax of the cosines themselves would give the best only {raw}. So they are first multiplied by a learned number, here {scale}: “{best}” {bestShare}, “{second}” {secondShare}.",
      zh: "第二名 “{second}” 低 {gap}。直接对余弦做 softmax，第一名只有 {raw}。所以先把余弦乘上一个学到的数，这里是 {scale}：“{best}” {bestShare}，“{second}” {secondShare}。",
    },
    {
      async facts(ask, { answer, order }) {
        const rest = answer.texts.filter((_, i) => i !== order[0]), without = await ask.sentences(rest), winner = indexOfHighest(without.probability);
        return { winner: without.texts[winner], winnerShare: percent(without.probability[winner]), winnerCosine: decimal(without.cosine[winner]) };
      },
      state: { step: "image", heat: "none" },
      en: "Now leave out “{best}”. What will {model} say?",
      zh: "现在去掉 “{best}”，{model} 会怎么说？",
      reveal: {
        en: "“{winner}”, {winnerShare}, though its cosine is {winnerCosine} as before. Probabilities are among the sentences you offer. None of these is not an answer, unless you write such a sentence.",
        zh: "“{winner}”，{winnerShare}，尽管它的余弦还是 {winnerCosine}。概率只在你给出的句子之间分配。“都不是”不会成为答案，除非你写出这样的句子。",
      },
    },
    {
      figure: (_, { answer, order: [a, b] }) => [a, b].map((i) => ({ values: Float32Array.from(answer.maps[i].flat()), caption: caption(answer.texts[i]) })),
      state: { step: "image", heat: "none" },
      en: "Which patches speak for a sentence? Gradients of the score through the attention show it. Other words light up other places, or the same ones: the map tells what the model used, not what is right.",
      zh: "哪些图块支持某个句子？分数经过注意力的梯度可以显示出来。换一句话，亮的地方可能不同，也可能相同：图上是模型用到了什么，而不是什么才对。",
    },
    {
      async facts(ask, { thing }) {
        const wordings = [thing, `a photo of a ${thing}`, `a blurry photo of a ${thing}`], { cosine } = await ask.sentences(wordings);
        const verdict = WORDING[Math.max(...cosine) - Math.min(...cosine) >= 0.01 ? "counts" : "not"];
        return Object.fromEntries([["verdict", verdict], ...wordings.map((text, i) => [`wording${i}`, text]), ...cosine.map((value, i) => [`cosine${i}`, decimal(value, 3)])]);
      },
      state: { step: "image", heat: "none" },
      en: "Say the same in other words. “{wording0}”: {cosine0}. “{wording1}”: {cosine1}. “{wording2}”: {cosine2}. {verdict}",
      zh: "换个说法试试。“{wording0}”：{cosine0}。“{wording1}”：{cosine1}。“{wording2}”：{cosine2}。{verdict}",
    },
    {
      state: { step: "image", heat: "none" }, panel: "sentences",
      en: "A CLIP knows the words of its captions. A sentence about anything else gets a number too, which means little. Write your own sentences now, some fair and some silly.",
      zh: "CLIP 只懂它见过的说明文字里的词。别的句子也会得到一个数，但没什么意义。现在写几个自己的句子吧，有靠谱的，也有离谱的。",
    },
  ],
};
