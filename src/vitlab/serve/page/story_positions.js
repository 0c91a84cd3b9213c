// Why positions: what attention cannot know without them, and what the answer loses.
import { percent } from "./draw.js";
import { evenDistance, indexOfHighest, meanDistances, similarityByPlace } from "./story_measures.js";
import { decimal } from "./story_words.js";

const KINDS = {
  learned: { en: "Here these vectors are weights: random at first, then learned.", zh: "在这个模型里，这些向量是权重：一开始随机，训练中学出来。" },
  sincos: { en: "Here these vectors are sines and cosines of row and column; nothing is learned.", zh: "在这个模型里，这些向量由行号和列号的正弦、余弦算出，不需要学习。" },
};
const FOUND = {
  learned: { en: "Nobody told the network which places are neighbours. It found out.", zh: "没有谁告诉网络哪些位置相邻，是它自己发现的。" },
  computed: { en: "That is built in: near places get similar sines.", zh: "这是公式决定的：位置相近，正弦值就相近。" },
  not: { en: "Here neighbours are not more alike than distant places.", zh: "在这个模型里，相邻的位置并不比远处的更相似。" },
};
const CROSS = {
  seen: { en: "So the table knows rows and columns, as Figure 7 of the ViT paper shows.", zh: "可见这张表认得行和列，正如 ViT 论文的图 7 所示。" },
  not: { en: "Rows and columns hardly show here.", zh: "在这个模型里，行和列不太看得出来。" },
};
const REMOVED = {
  other: { en: "All patches are still there. What is lost is how they fit together.", zh: "图块一个都没少，丢掉的是它们怎样拼在一起。" },
  less: { en: "The answer stays, less sure. What the patches show goes a long way, wherever they are.", zh: "答案没变，把握小了。光看图块里有什么、不管在哪里，也能走很远。" },
  same: { en: "The answer holds: for this image it is enough what the patches show, wherever they are.", zh: "答案站得住：对这张图片，只看图块里有什么、不管在哪里，就够了。" },
};
const HEADS = {
  grows: { en: "It found its neighbours by their positions.", zh: "它是靠位置找到邻居的。" },
  stays: { en: "This head goes more by what patches show than by where they are.", zh: "这个头更看重图块里有什么，而不是图块在哪里。" },
};

// How alike the position of the patch in the middle is to all others.
function map(_, { table, centrePatch, patches }) {
  return [{ values: table.data.subarray(centrePatch * patches, (centrePatch + 1) * patches), mark: centrePatch, caption: { en: "Bright: like the marked place.", zh: "越亮，越像标出的位置。" } }];
}
const kindOf = (about) => (about.positions.startsWith("learned") ? "learned" : "sincos");

export const story = {
  name: "positions",
  title: { en: "Why positions", zh: "为什么需要位置" },
  summary: { en: "Take the positions away and see what is lost.", zh: "拿掉位置，看看丢了什么。" },
  needs: { offers: ["predict", "forward", "edit", "attention", "positions"] },
  model: { en: "a ViT that knows classes and adds positions to its tokens", zh: "认识类别、并给 token 加位置的 ViT" },

  async facts(ask) {
    const { about } = ask, [rows, columns] = about.grid, table = await ask.positions(), byPlace = similarityByPlace(table), full = await ask.answer();
    const centrePatch = Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    return {
      centrePatch, centre: about.prefix.length + centrePatch, rows, columns, patches: rows * columns, width: about.width,
      table, similarity: byPlace, label: full.label, before: percent(full.probability), kind: KINDS[kindOf(about)],
    };
  },

  scenes: [
    {
      state: ({ centre }) => ({ step: "patches", token: centre }),
      en: "Attention sums over a set of tokens, and a sum does not know the order. Put the tokens in another order: without positions each gets exactly the same result as before.",
      zh: "注意力是对一组 token 求和，而求和不管顺序。把 token 打乱重排：如果没有位置，每个 token 得到的结果和原来完全一样。",
    },
    {
      state: ({ centre }) => ({ step: "positions", token: centre }),
      en: "So a vector for its place is added to every token: {patches} vectors of {width} numbers, one for each place in the grid. {kind}",
      zh: "所以要给每个 token 加上一个代表位置的向量：网格里每个位置一个，一共 {patches} 个，每个 {width} 个数。{kind}",
    },
    {
      facts: ({ about }, { similarity: { near, far } }) => ({ near: decimal(near), far: decimal(far), found: FOUND[near <= far ? "not" : kindOf(about) === "learned" ? "learned" : "computed"] }),
      state: ({ centre }) => ({ step: "positions", token: centre }),
      figure: map,
      en: "Compare the vectors with each other. Neighbours have a cosine of {near} on average, places half the image or more apart {far}. {found}",
      zh: "把这些向量两两比较。相邻位置的余弦平均是 {near}，相隔半张图以上的是 {far}。{found}",
    },
    {
      facts: (_, { similarity: { row, column, elsewhere } }) => ({ row: decimal(row), column: decimal(column), elsewhere: decimal(elsewhere), cross: CROSS[Math.min(row, column) > elsewhere ? "seen" : "not"] }),
      state: ({ centre }) => ({ step: "positions", token: centre }),
      figure: map,
      en: "Look for a cross in the map. Places in the same row: cosine {row}. In the same column: {column}. Anywhere else: {elsewhere}. {cross}",
      zh: "找找图里有没有一个十字。同一行的位置：余弦 {row}。同一列：{column}。其他地方：{elsewhere}。{cross}",
    },
    {
      async facts(ask) {
        const full = await ask.answer(), without = await ask.answer({ positions: "removed" }), sure = without.probabilities[full.index];
        const kind = without.index !== full.index ? "other" : sure < full.probability - 0.05 ? "less" : "same";
        return { removedLabel: without.label, removed: percent(without.probability), verdict: REMOVED[kind] };
      },
      state: { step: "answer" }, highlight: "answer",
      en: "With positions the answer is {label}, {before}. Now leave them all out. What will the model say?",
      zh: "有位置时，答案是 {label}，{before}。现在把位置全部拿掉，模型会怎么说？",
      reveal: {
        state: { edit: { positions: "removed" } },
        en: "{removedLabel}, {removed}. {verdict}",
        zh: "{removedLabel}，{removed}。{verdict}",
      },
    },
    {
      async facts(ask) {
        const shuffled = await ask.answer({ positions: "shuffled", seed: 0 });
        return { shuffledLabel: shuffled.label, shuffled: percent(shuffled.probability) };
      },
      state: { step: "answer", edit: { positions: "shuffled", seed: 0 } }, highlight: "answer",
      en: "Or give every patch the vector of some other place. To the blocks this is an image whose squares were dealt out at random: {shuffledLabel}, {shuffled}.",
      zh: "或者把位置打乱，让每个图块拿到别处的向量。对后面的 block 来说，这就是一张方块被随机重排的图片：{shuffledLabel}，{shuffled}。",
    },
    {
      async facts(ask) {
        const [kept, removed] = await Promise.all([ask.attention(0), ask.attention(0, { positions: "removed" })]), near = meanDistances(kept, ask.about), head = indexOfHighest(near.map((far) => -far));
        const without = meanDistances(removed, ask.about)[head];
        return { nearest: head, head: head + 1, distance: decimal(near[head], 1), without: decimal(without, 1), even: decimal(evenDistance(ask.about.grid), 1), why: HEADS[without > 1.1 * near[head] ? "grows" : "stays"] };
      },
      state: ({ centre, nearest }) => ({ step: "softmax", layer: 0, head: nearest, token: centre }),
      en: "Who uses them? Head {head} of block 1 looks {distance} patches away on average. Without positions it looks {without} away; attention spread evenly would be {even}. {why}",
      zh: "谁在用位置？第 1 个 block 的第 {head} 个头平均看 {distance} 个图块远。拿掉位置后是 {without}；注意力完全平均时是 {even}。{why}",
    },
    {
      state: { step: "positions" },
      en: "A table of positions fits one grid: {rows} × {columns} here. For larger images it is resized like a small picture. Newer ViTs often use rotary positions: they turn queries and keys by an angle instead and need no table.",
      zh: "位置表只适合一种网格：这里是 {rows} × {columns}。图片变大时，要像缩放小图那样缩放它。较新的 ViT 常用旋转位置编码：把查询和键转一个角度，不需要位置表。",
    },
  ],
};
