// What heads specialise in: distance, focus, habits, and which of them the answer needs.
import { percent } from "./draw.js";
import { evenDistance, habits, headRow, indexOfHighest, mean, meanDistances, overlap, spreads } from "./story_measures.js";
import { decimal, direction, whole } from "./story_words.js";

const DEPTH = {
  wider: { en: "The deeper, the wider: as in Figure 7 of the ViT paper.", zh: "越深看得越远，和 ViT 论文的图 7 一样。" },
  narrower: { en: "Here it is the other way round: late heads look nearer than early ones.", zh: "这里反过来：后面的头比前面的看得近。" },
  even: { en: "In this model depth hardly widens the view: from the start some heads look far.", zh: "在这个模型里，深度并没有让视野变宽多少：从一开始就有看得远的头。" },
};
const HABITS = {
  strong: { en: "And one has a habit.", zh: "还有一个头有习惯。" },
  weak: { en: "Some ViTs have heads with a fixed habit: always the patch next door, say. Here the strongest one is weak.", zh: "有些 ViT 的头有固定的习惯，比如总看隔壁的图块。这个模型里，最明显的也不强。" },
};
const SPARED = {
  little: { en: "Hardly anything. The other heads make up for it.", zh: "几乎没有影响，其他头补上了。" },
  much: { en: "The answer feels it.", zh: "答案受到了影响。" },
  better: { en: "The answer even gets surer without it.", zh: "没有它，答案反而更有把握。" },
};

// Where the patch in the middle looks in some heads.
const maps = (list, { layers, token, first }) => list.map(({ layer, head }) => ({ values: headRow(layers[layer], head, token).subarray(first), mark: token - first, caption: { en: `block ${layer + 1}, head ${head + 1}`, zh: `第 ${layer + 1} 个 block，第 ${head + 1} 个头` } }));

export const story = {
  name: "heads",
  title: { en: "What heads specialise in", zh: "注意力头各有什么专长" },
  summary: { en: "Near and far, sharp and broad, and some with a habit.", zh: "有的看近，有的看远；有的专注，有的分散；还有的有习惯。" },
  needs: { offers: ["predict", "forward", "edit", "attention"] },
  model: { en: "a ViT that knows classes", zh: "认识类别的 ViT" },

  async facts(ask) {
    const { about } = ask, layers = await Promise.all(Array.from({ length: about.depth }, (_, layer) => ask.attention(layer)));
    const [rows, columns] = about.grid, heads = (measure) => layers.flatMap((layer, l) => measure(layer, about).map((value, h) => ({ layer: l, head: h, value })));
    return {
      layers, first: about.prefix.length, distances: heads(meanDistances), spread: heads(spreads), habit: heads(habits), token: about.prefix.length + Math.floor(rows / 2) * columns + Math.floor(columns / 2),
      heads: about.heads, depth: about.depth, width: about.width, headWidth: about.head_dim, patches: rows * columns, tokens: about.prefix.length + rows * columns,
    };
  },

  scenes: [
    {
      state: ({ token }) => ({ step: "qkv", layer: 0, head: 0, token }),
      en: "A block does not look once but {heads} times at the same moment. Each head has its own matrices that make queries, keys and values: from the token's {width} numbers down to {headWidth}.",
      zh: "一个 block 不是只看一次，而是同时看 {heads} 次。每个头都有自己的矩阵来生成查询、键和值：从 token 的 {width} 个数变成 {headWidth} 个数。",
    },
    {
      facts(_, { layers, heads, token }) {
        const rows = Array.from({ length: heads }, (_, h) => headRow(layers[0], h, token)), pairs = rows.flatMap((row, a) => rows.slice(a + 1).map((other, i) => ({ a, b: a + 1 + i, shared: overlap(row, other) })));
        const { a, b, shared } = pairs.reduce((best, one) => (one.shared < best.shared ? one : best), { a: 0, b: 0, shared: 1 });
        return { a: a + 1, b: b + 1, pair: [a, b].map((head) => ({ layer: 0, head })), firstHead: a, shared: percent(shared) };
      },
      state: ({ token, firstHead }) => ({ step: "heads", layer: 0, head: firstHead, token }),
      figure: (_, facts) => maps(facts.pair, facts),
      en: "Take the patch in the middle and put the heads of block 1 side by side. Heads {a} and {b} differ most: only {shared} of their attention falls on the same places.",
      zh: "选中间的图块，把第 1 个 block 的各个头并排来看。第 {a} 和第 {b} 个头差别最大：它们的注意力只有 {shared} 落在相同的地方。",
    },
    {
      facts({ about }, { distances }) {
        const [near, far] = [-1, 1].map((sign) => distances[indexOfHighest(distances.map(({ value }) => sign * value))]);
        return { near, far, nearHead: near.head + 1, nearBlock: near.layer + 1, nearDistance: decimal(near.value, 1), farHead: far.head + 1, farBlock: far.layer + 1, farDistance: decimal(far.value, 1), even: decimal(evenDistance(about.grid), 1) };
      },
      state: ({ token, near }) => ({ step: "softmax", layer: near.layer, head: near.head, token }),
      figure: (_, facts) => maps([facts.near, facts.far], facts),
      en: "Some look near, some far. Head {nearHead} of block {nearBlock}: {nearDistance} patches away on average. Head {farHead} of block {farBlock}: {farDistance}. Attention spread evenly over the image would be {even}.",
      zh: "有的看近处，有的看远处。第 {nearBlock} 个 block 的第 {nearHead} 个头：平均 {nearDistance} 个图块远。第 {farBlock} 个 block 的第 {farHead} 个头：{farDistance}。如果注意力平均分布在整张图上，是 {even}。",
    },
    {
      facts(_, { distances, depth }) {
        const of = (layer) => mean(distances.filter((one) => one.layer === layer).map(({ value }) => value)), first = of(0), last = of(depth - 1);
        return { firstDistance: decimal(first, 1), lastDistance: decimal(last, 1), trend: DEPTH[last > 1.1 * first ? "wider" : last < 0.9 * first ? "narrower" : "even"] };
      },
      state: ({ token, depth }) => ({ step: "heads", layer: depth - 1, token }),
      en: "Does the view widen with depth? Mean of the heads in block 1: {firstDistance} patches. In block {depth}: {lastDistance}. {trend}",
      zh: "越深视野越宽吗？第 1 个 block 各头平均：{firstDistance} 个图块。第 {depth} 个 block：{lastDistance}。{trend}",
    },
    {
      facts(_, { spread }) {
        const [sharp, broad] = [-1, 1].map((sign) => spread[indexOfHighest(spread.map(({ value }) => sign * value))]);
        return { sharp, broad, sharpHead: sharp.head + 1, sharpBlock: sharp.layer + 1, sharpTokens: decimal(sharp.value, 1), broadHead: broad.head + 1, broadBlock: broad.layer + 1, broadTokens: whole(broad.value) };
      },
      state: ({ token, sharp }) => ({ step: "softmax", layer: sharp.layer, head: sharp.head, token }),
      figure: (_, facts) => maps([facts.sharp, facts.broad], facts),
      en: "Some focus, some take everything in. Head {sharpHead} of block {sharpBlock} spreads its attention over about {sharpTokens} tokens, head {broadHead} of block {broadBlock} over {broadTokens} of {tokens}. (This is the exponential of the entropy.)",
      zh: "有的专注，有的什么都看一点。第 {sharpBlock} 个 block 的第 {sharpHead} 个头，注意力大约分在 {sharpTokens} 个 token 上；第 {broadBlock} 个 block 的第 {broadHead} 个头，分在 {tokens} 个中的 {broadTokens} 个上。（按熵的指数计算。）",
    },
    {
      facts(_, { habit, tokens }) {
        const best = habit[indexOfHighest(habit.map(({ value }) => value.share))];
        return { best, hasHabit: HABITS[best.value.share * tokens >= 4 ? "strong" : "weak"], habitHead: best.head + 1, habitBlock: best.layer + 1, direction: direction(best.value.offset), share: percent(best.value.share), even: percent(1 / tokens) };
      },
      state: ({ token, best }) => ({ step: "softmax", layer: best.layer, head: best.head, token }),
      figure: (_, facts) => maps([facts.best], facts),
      en: "{hasHabit} In head {habitHead} of block {habitBlock} a patch gives {share} of its attention, on average, to the patch {direction}. Spread evenly it would be {even}. Choose other patches and watch.",
      zh: "{hasHabit}在第 {habitBlock} 个 block 的第 {habitHead} 个头里，每个图块平均把 {share} 的注意力给了{direction}的图块；平均分的话只有 {even}。换几个图块，观察一下。",
    },
    {
      async facts(ask, { habit }) {
        const best = habit[indexOfHighest(habit.map(({ value }) => value.share))], edit = { drop_heads: [[best.layer, best.head]] };
        const full = await ask.answer(), without = (await ask.answer(edit)).probabilities[full.index], change = without - full.probability;
        return { edit, label: full.label, before: percent(full.probability), without: percent(without), spared: SPARED[change > 0.02 ? "better" : change < -0.05 ? "much" : "little"] };
      },
      state: { step: "answer" }, highlight: "answer",
      en: "Now switch this head off. The answer is {label}, {before}. What will be lost?",
      zh: "现在把这个头关掉。原来的答案是 {label}，{before}。会损失什么？",
      reveal: {
        state: ({ edit }) => ({ edit }),
        en: "{label} gets {without}. {spared}",
        zh: "{label} 变成 {without}。{spared}",
      },
    },
    {
      async facts(ask, { heads }) {
        const full = await ask.answer(), dropped = await Promise.all(Array.from({ length: heads }, (_, head) => ask.answer({ drop_heads: [[0, head]] })));
        const left = dropped.map(({ probabilities }) => probabilities[full.index]), worst = indexOfHighest(left.map((value) => -value)), spare = indexOfHighest(left);
        return { worst, worstHead: worst + 1, worstLeft: percent(left[worst]), spareHead: spare + 1, spareLeft: percent(left[spare]), label: full.label };
      },
      state: ({ worst }) => ({ step: "answer", layer: 0, head: worst, edit: { drop_heads: [[0, worst]] } }), highlight: "answer",
      en: "Drop each head of block 1 in turn. Without head {worstHead}, {label} gets {worstLeft}; without head {spareHead}, {spareLeft}. No head was told its job: all began as random numbers, and training made them differ.",
      zh: "把第 1 个 block 的头逐个关掉。没有第 {worstHead} 个头，{label} 是 {worstLeft}；没有第 {spareHead} 个头，是 {spareLeft}。没有人给它们分工：所有头都从随机数开始，训练让它们变得不同。",
    },
  ],
};
