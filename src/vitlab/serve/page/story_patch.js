// What a patch becomes: one square of pixels, followed from the image to the answer.
import { percent } from "./draw.js";
import { cosine, indexOfHighest, norm, readerRow } from "./story_measures.js";
import { decimal, place, whole } from "./story_words.js";

const STEMS = {
  patch: {
    en: "The numbers of its {pixels} pixels are multiplied by one matrix, E. It is the same for every patch.",
    zh: "把这 {pixels} 个像素的数值乘上一个矩阵 E。所有图块共用这一个矩阵。",
  },
  conv: {
    en: "In this model a few small convolutions read the square, and a little of what lies around it. They are the same for every patch.",
    zh: "这个模型用几层小卷积来读这个方块，也会读到它周围的一点点。所有图块共用这些卷积。",
  },
  other: { en: "In this model a convolutional network reads the image and gives one vector for each square.", zh: "这个模型先用一个卷积网络读图片，给每个方块一个向量。" },
};
const PLACES = {
  added: {
    en: "A vector that stands for its place is added. Before, the token had length {before}; now it has {after}. Two equal patches in different corners are different tokens from here on.",
    zh: "再加上一个代表位置的向量。相加之前，token 的长度是 {before}；现在是 {after}。两个一模一样的图块，只要位置不同，从这里起就是不同的 token。",
  },
  later: {
    en: "Many ViTs now add a vector that stands for the patch's place. This one does not: it tells the places apart inside attention.",
    zh: "许多 ViT 会在这里加上一个代表位置的向量。这个模型不加：它在注意力内部区分位置。",
  },
};
const MOST = {
  itself: { en: "Head {head} keeps most for itself: {own}.", zh: "第 {head} 个头把最多的注意力留给了自己：{own}。" },
  patch: { en: "Head {head} gives most to {target}, {most}, and {own} to the patch itself.", zh: "第 {head} 个头给{target}的最多，有 {most}；给自己 {own}。" },
  prefix: { en: "Head {head} gives most to the {target} token, {most}, and {own} to the patch itself.", zh: "第 {head} 个头给 {target} token 的最多，有 {most}；给自己 {own}。" },
};
const UNITS = {
  activation: { en: "For our token {active} of them are above zero; the activation lets these through and nearly silences the rest.", zh: "对我们的 token，其中 {active} 个大于零；激活函数让它们通过，其余的几乎压到零。" },
  gate: { en: "Each is multiplied by a gate, computed from the same token, that opens or closes it.", zh: "每个单元都乘上一个门；门也由这个 token 算出，决定让它通过还是关上。" },
};
const TURNED = {
  little: { en: "After block 1 it still points much the same way", zh: "经过第 1 个 block，它的方向大体没变" },
  much: { en: "Even so, block 1 has turned it to a new direction", zh: "即便如此，第 1 个 block 已经让它明显转了方向" },
};
const ALIKE = {
  little: { en: "Hardly", zh: "几乎不像了" }, partly: { en: "Partly", zh: "还有几分像" }, very: { en: "Yes, very much so", zh: "还很像" },
};
const LOST = {
  little: { en: "Little is lost: the other patches carry the answer without it.", zh: "影响很小：没有它，其他图块也撑得起这个答案。" },
  much: { en: "That is a lot for one patch in {patches}.", zh: "对 {patches} 个图块中的一个来说，这个影响不小。" },
  better: { en: "The answer even gets surer: this patch spoke against it.", zh: "答案反而更有把握了：这个图块原来起的是反作用。" },
};

export const story = {
  name: "patch",
  title: { en: "What a patch becomes", zh: "一个图块会变成什么" },
  summary: { en: "One square of pixels, from the image to the answer.", zh: "跟着一小块像素，从图片一直走到答案。" },
  needs: { offers: ["predict", "forward", "edit", "block", "attention"] },
  model: { en: "a ViT that knows classes", zh: "认识类别的 ViT" },

  async facts(ask) {
    const { about } = ask, row = readerRow(await ask.attention(about.depth - 1), about), patch = indexOfHighest(row.subarray(about.prefix.length));
    return {
      patch, token: about.prefix.length + patch, model: about.name, depth: about.depth, width: about.width, hidden: about.hidden,
      rows: about.grid[0], columns: about.grid[1], patches: about.grid[0] * about.grid[1], side: about.patch, pixels: about.patch ** 2,
      high: about.size[0], wide: about.size[1], place: place(patch, about.grid), tokens: about.prefix.length + about.grid[0] * about.grid[1],
    };
  },

  scenes: [
    {
      state: { step: "image", heat: "none" }, highlight: "photo",
      figure: () => [{ seen: true, caption: { en: "as the model gets it", zh: "模型得到的图片" } }],
      en: "This is all that {model} gets: {high} × {wide} pixels, a list of numbers. Nothing says which pixels belong together.",
      zh: "{model} 得到的只有这些：{high} × {wide} 个像素，也就是一串数字。没有谁告诉它哪些像素属于同一样东西。",
    },
    {
      state: ({ token }) => ({ step: "patches", token }),
      en: "The image is cut into {rows} × {columns} = {patches} squares of {side} × {side} pixels: the patches. We follow the one in {place}. It is the patch that the last block looks at most.",
      zh: "图片被切成 {rows} × {columns} = {patches} 个方块，每个 {side} × {side} 像素，叫作图块（patch）。我们跟着{place}的那一个走：最后一个 block 看得最多的就是它。",
    },
    {
      facts: ({ about }) => ({ stem: STEMS[about.stem] }),
      state: ({ token }) => ({ step: "embed", token }),
      en: "{stem} Out comes a token: a vector of {width} numbers. From here on the network sees tokens, never pixels.",
      zh: "{stem}结果是一个 token：由 {width} 个数组成的向量。从这里起，网络看到的是 token，不再是像素。",
    },
    {
      async facts(ask, { token }) {
        const lengths = (await ask.forward()).lengths, embed = lengths.patch_embed, added = lengths.positions;
        if (!added) return { places: PLACES.later, placeStep: "embed" };
        return { places: PLACES.added, placeStep: "positions", before: decimal(embed[embed.length - added.length + token]), after: decimal(added[token]) };
      },
      state: ({ token, placeStep }) => ({ step: placeStep, token }),
      en: "{places}",
      zh: "{places}",
    },
    {
      async facts(ask, { token }) {
        const { about } = ask, { weights } = await ask.block({ layer: 0, head: 0, token }), target = indexOfHighest(weights), first = about.prefix.length;
        const kind = target === token ? "itself" : target < first ? "prefix" : "patch";
        return { sentence: MOST[kind], head: 1, own: percent(weights[token]), most: percent(weights[target]), target: kind === "prefix" ? about.prefix[target] : place(target - first, about.grid) };
      },
      state: ({ token }) => ({ step: "softmax", layer: 0, head: 0, token }),
      en: "Block 1: attention. The token compares its query q with the keys k of all {tokens} tokens, and takes a weighted mean of their values. {sentence}",
      zh: "第 1 个 block：注意力。这个 token 用自己的查询 q 与全部 {tokens} 个 token 的键 k 作比较，再把它们的值加权平均。{sentence}",
    },
    {
      async facts(ask, { token }) {
        const { fc1_pre } = await ask.block({ layer: 0, head: 0, token });
        return { active: whole(fc1_pre.filter((value) => value > 0).length), units: UNITS[ask.about.gated ? "gate" : "activation"] };
      },
      state: ({ token }) => ({ step: "gelu", layer: 0, token }),
      en: "Then the MLP, which works on each token alone. It has {hidden} hidden units. {units}",
      zh: "接着是 MLP，它对每个 token 单独计算。隐藏层有 {hidden} 个单元。{units}",
    },
    {
      async facts(ask, { token }) {
        const { input, output } = await ask.block({ layer: 0, head: 0, token }), similarity = cosine(input, output);
        return { first: decimal(similarity), turned: TURNED[similarity >= 0.7 ? "little" : "much"], length0: decimal(norm(input)), length1: decimal(norm(output)) };
      },
      state: ({ token }) => ({ step: "add2", layer: 0, token }),
      en: "Nothing is overwritten: attention and MLP are added to what was there. {turned} (cosine {first}); its length goes from {length0} to {length1}.",
      zh: "没有什么被覆盖：注意力和 MLP 的结果都是加到原来的值上。{turned}（余弦 {first}），长度从 {length0} 变为 {length1}。",
    },
    {
      async facts(ask, { token, depth }) {
        const [before, after] = await Promise.all([ask.block({ layer: 0, head: 0, token }), ask.block({ layer: depth - 1, head: 0, token })]);
        const similarity = cosine(before.input, after.output);
        return { last: decimal(similarity), alike: ALIKE[similarity < 0.3 ? "little" : similarity < 0.7 ? "partly" : "very"] };
      },
      state: ({ token, depth }) => ({ step: "block", layer: depth - 1, token }),
      en: "{depth} blocks later. How much is the token still like the one that came in?",
      zh: "走完 {depth} 个 block。它和刚进来时的那个 token 还像吗？",
      reveal: {
        en: "{alike}: cosine {last}. It began as the colours of one square. The blocks have added what they found in the other tokens.",
        zh: "{alike}：余弦 {last}。它起初只是一个方块的颜色；各个 block 又把从其他 token 那里得到的东西加了进来。",
      },
    },
    {
      async facts(ask, { patch }) {
        const full = await ask.answer(), without = await ask.answer({ mask_patches: [patch] }), change = without.probabilities[full.index] - full.probability;
        return { label: full.label, before: percent(full.probability), after: percent(without.probabilities[full.index]), lost: LOST[change > 0.02 ? "better" : change < -0.05 ? "much" : "little"] };
      },
      state: ({ token, patch }) => ({ step: "answer", token, edit: { mask_patches: [patch] } }), highlight: "answer",
      en: "How much hangs on it? With all patches the answer is {label}, {before}. Blank this one, its embedding set to zero, and {label} gets {after}. {lost} Now pick another patch and follow it yourself.",
      zh: "答案有多依赖它？用全部图块时，答案是 {label}，{before}。把这一个抹成空白（嵌入置零），{label} 变成 {after}。{lost}现在换一个图块，自己跟一遍吧。",
    },
  ],
};
