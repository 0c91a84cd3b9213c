// What is lost with fewer tokens: token merging (ToMe, arXiv:2210.09461) on one image, against chance.
import { percent } from "./draw.js";
import { mean } from "./story_measures.js";
import { decimal, whole } from "./story_words.js";

const REPEATS = {
  many: { en: "This image repeats itself.", zh: "这张图片有很多重复。" },
  few: { en: "The others will be harder to merge.", zh: "其余的合并起来会更难。" },
};
const COST = {
  none: { en: "Next to nothing is lost.", zh: "几乎没有损失。" },
  some: { en: "The answer holds, less sure.", zh: "答案没变，只是把握小了些。" },
  gain: { en: "The answer holds and is even surer. On one image that can be chance.", zh: "答案没变，反而更有把握。单看一张图，这可能只是碰巧。" },
  other: { en: "The answer is another: too much was merged for this image.", zh: "答案变了：对这张图片来说合并得太多。" },
};
const CHANCE = {
  better: { en: "Here it matters which tokens go: merging keeps something of each, dropping does not.", zh: "在这张图上，去掉哪些 token 很要紧：合并时每个都留下一些，丢弃则什么都不留。" },
  equal: { en: "On this image chance does as well. One image proves little: compare on a whole test set.", zh: "在这张图上，随机也不差。一张图说明不了什么，要在整个测试集上比较。" },
};
const TIMES = {
  faster: { en: "Measured just now: {plain} ms with all tokens, {fewer} ms with fewer.", zh: "刚才实测：全部 token 用 {plain} 毫秒，减少之后用 {fewer} 毫秒。" },
  slower: { en: "Measured just now: {plain} ms with all tokens, {fewer} ms with fewer. No gain: finding the pairs takes time too, and {tokens} tokens are few.", zh: "刚才实测：全部 token 用 {plain} 毫秒，减少之后用 {fewer} 毫秒。没有变快：找配对也要时间，而 {tokens} 个 token 本来就不多。" },
};

const cost = (full, index, probability) => (index !== full.index ? "other" : probability > full.probability + 0.02 ? "gain" : probability < full.probability - 0.05 ? "some" : "none");
const COLOURS = { en: "Patches that share a token share its colour.", zh: "共用一个 token 的图块，颜色相同。" };

export const story = {
  name: "fewer",
  title: { en: "What is lost with fewer tokens", zh: "token 少了会丢什么" },
  summary: { en: "Merge the tokens that are alike, and watch the answer.", zh: "把相似的 token 合并，看答案怎么变。" },
  needs: { offers: ["predict", "forward", "fewer", "similarity"] },
  model: { en: "a ViT that knows classes", zh: "认识类别的 ViT" },

  async facts(ask) {
    const { about } = ask, patches = about.grid[0] * about.grid[1], tokens = about.prefix.length + patches, most = Math.max(1, Math.floor(patches / about.depth) - 1), r = Math.max(1, Math.round(most / 2));
    const [full, merged] = [await ask.answer(), await ask.fewer(`tome:r=${r}`)];
    return { full, merged, most, r, patches, tokens, depth: about.depth, heads: about.heads, label: full.label, before: percent(full.probability), left: merged.tokens.at(-1) };
  },

  scenes: [
    {
      facts: (_, { tokens }) => ({ pairs: whole(tokens * tokens) }),
      state: { step: "scores", layer: 0 },
      en: "Attention compares every token with every token: {tokens} × {tokens} = {pairs} products in each head of each block. Twice the tokens, four times the products.",
      zh: "注意力要把每个 token 与每个 token 作比较：每个 block 的每个头都要算 {tokens} × {tokens} = {pairs} 次点积。token 翻倍，点积就是四倍。",
    },
    {
      async facts(ask) {
        const { data, shape: [patches] } = await ask.similarity(), nearest = Array.from({ length: patches }, (_, a) => Math.max(...Array.from({ length: patches }, (_, b) => (a === b ? -1 : data[a * patches + b]))));
        const share = nearest.filter((value) => value > 0.9).length / patches;
        return { alike: percent(share), nearest: decimal(mean(nearest)), repeats: REPEATS[share >= 0.5 ? "many" : "few"] };
      },
      state: { step: "patches" },
      en: "Do we need them all? Compare the tokens that come out at the end. {alike} of the patches have a near twin: another patch with a cosine above 0.9. {repeats}",
      zh: "都需要吗？比较最后得到的 token：{alike} 的图块有一个“双胞胎”，也就是余弦高于 0.9 的另一个图块。{repeats}",
    },
    {
      state: { step: "image", heat: "none" },
      en: "Token merging (ToMe) uses that. In every block it takes the {r} closest pairs that it finds and makes one token of each: their mean, weighted by how many patches each stands for.",
      zh: "合并 token（ToMe）利用的就是这一点。在每个 block 里，它取找到的最相似的 {r} 对 token，把每一对合成一个：按各自代表的图块数加权平均。",
    },
    {
      facts(_, { merged }) {
        const sizes = new Map();
        for (const group of merged.groups.at(-1).flat()) sizes.set(group, (sizes.get(group) || 0) + 1);
        return { largest: Math.max(...sizes.values()) };
      },
      figure: (_, { merged }) => [{ groups: merged.groups.at(-1), caption: COLOURS }],
      state: { step: "image", heat: "none" },
      en: "After {depth} blocks {left} of {tokens} tokens are left. The largest one stands for {largest} patches. Nothing was thrown away: every patch is still part of some token.",
      zh: "经过 {depth} 个 block，{tokens} 个 token 剩下 {left} 个。最大的一个代表 {largest} 个图块。什么都没扔掉：每个图块仍在某个 token 里。",
    },
    {
      facts(ask, { full, merged }) {
        const best = merged.scores[0], index = ask.about.labels.indexOf(best.label);
        return { mergedLabel: best.label, mergedShare: percent(best.probability), verdict: COST[cost(full, index, best.probability)] };
      },
      figure: (_, { merged }) => [{ groups: merged.groups.at(-1), caption: COLOURS }],
      state: { step: "image", heat: "none" },
      en: "With all tokens the answer is {label}, {before}. What is it with {left}?",
      zh: "用全部 token，答案是 {label}，{before}。只剩 {left} 个呢？",
      reveal: {
        en: "{mergedLabel}, {mergedShare}. {verdict}",
        zh: "{mergedLabel}，{mergedShare}。{verdict}",
      },
    },
    {
      async facts(ask, { full, merged, r }) {
        const random = await ask.fewer(`random:like=tome:r=${r}`), probabilityOf = ({ scores }) => scores.find(({ label }) => label === full.label)?.probability ?? 0;
        return { random, randomLabel: random.scores[0].label, randomShare: percent(random.scores[0].probability), chance: CHANCE[probabilityOf(merged) > probabilityOf(random) ? "better" : "equal"] };
      },
      figure: (_, { random }) => [{ groups: random.groups.at(-1), caption: { en: "Black: dropped.", zh: "黑色：已丢弃。" } }],
      state: { step: "image", heat: "none" },
      en: "Is merging clever, or would any way do? Drop just as many tokens at random: {randomLabel}, {randomShare}. {chance}",
      zh: "是合并聪明，还是怎么去掉都行？随机丢弃同样多的 token：{randomLabel}，{randomShare}。{chance}",
    },
    {
      async facts(ask, { full, most }) {
        const extreme = await ask.fewer(`tome:r=${most}`), best = extreme.scores[0];
        return { extreme, fewest: extreme.tokens.at(-1), extremeLabel: best.label, extremeShare: percent(best.probability), extremeCost: COST[cost(full, ask.about.labels.indexOf(best.label), best.probability)] };
      },
      figure: (_, { extreme }) => [{ groups: extreme.groups.at(-1), caption: COLOURS }],
      state: { step: "image", heat: "none" },
      en: "Go to the limit: merge {most} in every block, until {fewest} tokens are left for the whole image. {extremeLabel}, {extremeShare}. {extremeCost}",
      zh: "走到极限：每个 block 合并 {most} 个，直到整张图只剩 {fewest} 个 token。{extremeLabel}，{extremeShare}。{extremeCost}",
    },
    {
      facts(_, { merged: { milliseconds } }) {
        if (!milliseconds) return { timing: "" };
        return { plain: decimal(milliseconds.plain, 1), fewer: decimal(milliseconds.fewer, 1), timing: TIMES[milliseconds.fewer < milliseconds.plain ? "faster" : "slower"] };
      },
      state: { step: "image", heat: "none" }, panel: "fewer",
      en: "{timing} Large models on large images gain: there the blocks do most of the work, and it shrinks with the tokens.",
      zh: "{timing}真正受益的是大模型和大图片：那里大部分工作在 block 里，token 少了，工作也就少了。",
    },
  ],
};
