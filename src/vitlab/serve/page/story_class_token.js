// What the class token collects: a token without a patch that ends up holding the answer.
import { percent, strongest } from "./draw.js";
import { indexOfHighest, readerRow, settledAt, sum } from "./story_measures.js";
import { place } from "./story_words.js";

const SETTLED = {
  first: { en: "From the very first block.", zh: "从第 1 个 block 就开始了。" },
  later: { en: "From block {settled} on. After block 1 it would say {early}, {earlyShare}.", zh: "从第 {settled} 个 block 开始。第 1 个 block 之后，它会说 {early}，{earlyShare}。" },
};
const PICKY = { yes: { en: "It is picky.", zh: "它很挑剔。" }, no: { en: "It is not very picky.", zh: "它并不太挑剔。" } };
const VERDICTS = {
  map: { en: "Here the class token looked at what matters.", zh: "在这张图上，类别 token 看的正是要紧的地方。" },
  misleads: { en: "Here the map misleads: attention says where the token looked, not what decides.", zh: "在这张图上，注意力图会误导人：它说的是 token 看了哪里，而不是什么决定了答案。" },
};

const looks = (values) => [{ values, caption: { en: "Where it looks, mean of all heads. Bright: much.", zh: "它看哪里，各头平均。越亮越多。" } }];

export const story = {
  name: "class-token",
  title: { en: "What the class token collects", zh: "类别 token 收集了什么" },
  summary: { en: "One token without a patch ends up with the answer.", zh: "一个不属于任何图块的 token，最后拿到了答案。" },
  needs: { offers: ["predict", "forward", "edit", "block", "attention"], readsClassToken: true },
  model: { en: "a ViT that knows classes and reads them from a class token", zh: "认识类别、并从类别 token 读出类别的 ViT" },

  async facts(ask) {
    const { about } = ask, patches = about.grid[0] * about.grid[1];
    return { token: about.reads, patches, heads: about.heads, depth: about.depth, width: about.width, headWidth: about.head_dim, tenth: Math.max(1, Math.round(patches / 10)), model: about.name };
  },

  scenes: [
    {
      state: ({ token }) => ({ step: "prefix", token }),
      en: "Before the {patches} patches stands one token that belongs to none of them: the class token. As it enters block 1 it is the same for every image in the world. It knows nothing of this one.",
      zh: "在 {patches} 个图块之前，排着一个不属于任何图块的 token：类别 token。进入第 1 个 block 时，不管是哪张图片，它都一模一样。对眼前这张，它一无所知。",
    },
    {
      async facts(ask, { token }) {
        const { about } = ask, row = readerRow(await ask.attention(0), about), onPatches = row.subarray(about.prefix.length), best = indexOfHighest(onPatches);
        return { onPatches, own: percent(row[token]), given: percent(sum(onPatches)), best: place(best, about.grid), most: percent(onPatches[best]) };
      },
      state: ({ token }) => ({ step: "softmax", layer: 0, token }),
      figure: (_, { onPatches }) => looks(onPatches),
      en: "In block 1 it looks for the first time. Mean of its {heads} heads: {own} stays with itself, {given} goes to patches, most of it to {best} ({most}).",
      zh: "在第 1 个 block 里，它第一次去看。{heads} 个头平均：{own} 留给自己，{given} 给了图块，其中{best}最多（{most}）。",
    },
    {
      state: ({ token }) => ({ step: "mix", layer: 0, token }),
      en: "The weights say where it looks. The values say what it takes. Each head brings home a weighted mean of the values, {headWidth} numbers; a matrix mixes those of all {heads} heads, and the result is added to the class token.",
      zh: "权重决定看哪里，值决定拿走什么。每个头带回值的加权平均，{headWidth} 个数；再用一个矩阵把 {heads} 个头的结果混合起来，加到类别 token 上。",
    },
    {
      async facts(ask, { depth, tenth, patches }) {
        const rows = await Promise.all(Array.from({ length: depth }, async (_, layer) => readerRow(await ask.attention(layer), ask.about).subarray(ask.about.prefix.length)));
        const shares = rows.map((row) => sum(strongest(row, tenth).map((patch) => row[patch])) / sum(row)), layer = indexOfHighest(shares);
        return { picky: PICKY[shares[layer] >= (2 * tenth) / patches ? "yes" : "no"], pickiestRow: rows[layer], pickiest: layer + 1, pickiestLayer: layer, share: percent(shares[layer]), even: percent(tenth / patches) };
      },
      state: ({ token, pickiestLayer }) => ({ step: "softmax", layer: pickiestLayer, token }),
      figure: (_, { pickiestRow }) => looks(pickiestRow),
      en: "{picky} In block {pickiest} its {tenth} favourite patches get {share} of what it gives to patches. Spread evenly, they would get {even}.",
      zh: "{picky}在第 {pickiest} 个 block 里，它最喜欢的 {tenth} 个图块分到了给图块的注意力的 {share}。如果平均分，只有 {even}。",
    },
    {
      async facts(ask) {
        const { by_depth } = await ask.forward(), full = await ask.answer(), settled = settledAt(by_depth), early = indexOfHighest(by_depth[0]);
        return { label: full.label, final: percent(full.probability), settled: settled + 1, early: ask.about.labels[early], earlyShare: percent(by_depth[0][early]), when: SETTLED[settled ? "later" : "first"] };
      },
      state: ({ token, depth }) => ({ step: "answer", layer: depth - 1, token }), highlight: "answer",
      en: "Let the classifier read the class token after each block, as if the network ended there. From which block on would the answer be {label}?",
      zh: "假设网络在每个 block 之后就结束，让分类头直接读类别 token。从第几个 block 起，答案会是 {label}？",
      reveal: {
        en: "{when} After the last block: {label}, {final}. The classifier was trained on the last block only, so this is a rough look at how the answer forms.",
        zh: "{when}最后一个 block 之后：{label}，{final}。分类头只针对最后一个 block 训练过，所以这只是粗略地看看答案怎样形成。",
      },
    },
    {
      async facts(ask, { depth, tenth }) {
        const row = readerRow(await ask.attention(depth - 1), ask.about).subarray(ask.about.prefix.length), liked = strongest(row, tenth), ignored = strongest(row.map((value) => -value), tenth);
        const full = await ask.answer(), [without, control] = await Promise.all([liked, ignored].map((mask_patches) => ask.answer({ mask_patches })));
        const [a, b] = [without, control].map(({ probabilities }) => probabilities[full.index]);
        return { liked, label: full.label, before: percent(full.probability), withoutLiked: percent(a), withoutIgnored: percent(b), verdict: VERDICTS[a < b ? "map" : "misleads"] };
      },
      state: ({ token, depth, liked }) => ({ step: "answer", layer: depth - 1, token, edit: { mask_patches: liked } }), highlight: "answer",
      en: "A test. Blank the {tenth} patches that it looks at most in the last block: {label} goes from {before} to {withoutLiked}. Blank the {tenth} that it looks at least instead: {withoutIgnored}. {verdict}",
      zh: "做个试验。抹掉它在最后一个 block 里看得最多的 {tenth} 个图块：{label} 从 {before} 变成 {withoutLiked}。换成抹掉看得最少的 {tenth} 个：{withoutIgnored}。{verdict}",
    },
    {
      state: ({ token, depth }) => ({ step: "pool", layer: depth - 1, token }),
      en: "At the end only this token counts: the classifier reads its {width} numbers and none of the patches. Some ViTs have no class token and read the mean of all patches. Both ways work.",
      zh: "到最后只有它算数：分类头读它的 {width} 个数，不读任何图块。也有些 ViT 没有类别 token，而是读所有图块的平均。两种办法都行得通。",
    },
  ],
};
