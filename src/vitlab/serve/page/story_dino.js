// DINO: self-distillation without labels (arXiv:2104.14294), and what its tokens know.
import { percent, strongest } from "./draw.js";
import { indexOfHighest, mean, readerRow, sum } from "./story_measures.js";
import { decimal, place } from "./story_words.js";

const NEIGHBOURS = {
  closer: { en: "What lies together in the image lies together among the tokens.", zh: "图片里挨在一起的，token 也彼此靠近。" },
  little: { en: "The difference is small: here all tokens have much in common.", zh: "差别不大：在这张图里，所有 token 都有不少共同之处。" },
  not: { en: "For this patch the neighbours are not closer than the rest: it lies on an edge, or stands alone.", zh: "对这个图块来说，邻居并不比其他图块更近：它在边缘上，或者自成一块。" },
};

const VIEWS = [[0, 0.05, 0.8, 0.8], [0.25, 0.2, 0.75, 0.75], [0.3, 0.25, 0.3, 0.3], [0.55, 0.55, 0.3, 0.3]]; // two large and two small crops
const LARGE = { en: "large: teacher and student", zh: "大：教师和学生都看" }, SMALL = { en: "small: student only", zh: "小：只有学生看" };
const views = () => VIEWS.map((crop) => ({ crop, caption: crop[2] > 0.5 ? LARGE : SMALL }));

export const story = {
  name: "dino",
  title: { en: "DINO: learn by comparing views", zh: "DINO：在对比中学习" },
  summary: { en: "No labels, and still the tokens of one thing are alike.", zh: "没有标签，同一样东西的 token 却彼此相似。" },
  needs: { offers: ["attention", "similarity", "colours"], without: ["predict"], family: /dino/i }, // "nobody told it" must be true
  model: { en: "a DINO, trained without labels", zh: "无标签训练的 DINO" },

  async facts(ask) {
    const { about } = ask, [rows, columns] = about.grid, patches = rows * columns, like = await ask.similarity();
    const row = readerRow(await ask.attention(about.depth - 1), about).subarray(about.prefix.length), patch = indexOfHighest(row);
    const token = about.prefix.length + patch;
    return { row, patch, token, reader: about.reads ?? token, like: like.data.subarray(patch * patches, (patch + 1) * patches), grid: about.grid, patches, place: place(patch, about.grid), model: about.name, depth: about.depth, width: about.width };
  },

  scenes: [
    {
      state: ({ token }) => ({ step: "image", token, heat: "none" }), highlight: "photo",
      en: "Nobody ever told {model} what is in an image. It learned from one rule only: two views of the same image should give the same answer.",
      zh: "从来没有人告诉过 {model} 图片里有什么。它只靠一条规则学习：同一张图片的两个视角，应该得到相同的回答。",
    },
    {
      state: ({ token }) => ({ step: "image", token, heat: "none" }),
      figure: views,
      en: "There are two networks of the same shape. The teacher sees two large crops of the image. The student sees these and several small ones, and must give the teacher's answer: the part has to tell of the whole.",
      zh: "有两个结构相同的网络。教师看图片的两个大裁剪；学生除了这两个，还要看几个小裁剪，并且答得和教师一样：要从局部说出整体。",
    },
    {
      state: ({ token }) => ({ step: "image", token, heat: "none" }),
      en: "Who teaches the teacher?",
      zh: "那么，教师又是谁教的？",
      reveal: {
        en: "The student. The teacher's weights are a slow running mean of the student's. Could both always give the same answer to everything? The teacher's outputs are centred and sharpened so that this does not pay.",
        zh: "是学生。教师的权重是学生权重的缓慢滑动平均。两个网络会不会对什么都给同一个答案？教师的输出要做中心化和锐化，这样偷懒就行不通了。",
      },
    },
    {
      facts(_, { like, patch, grid: [rows, columns] }) {
        const near = Array.from(like, (_, i) => Math.abs(Math.floor(i / columns) - Math.floor(patch / columns)) <= 1 && Math.abs((i % columns) - (patch % columns)) <= 1);
        const neighbours = mean(Array.from(like).filter((_, i) => near[i] && i !== patch)), others = mean(Array.from(like).filter((_, i) => !near[i]));
        return { neighbours: decimal(neighbours), others: decimal(others), verdict: NEIGHBOURS[neighbours > others + 0.05 ? "closer" : neighbours > others ? "little" : "not"] };
      },
      figure: (_, { like, patch }) => [{ values: like, mark: patch, caption: { en: "Bright: like the marked patch.", zh: "越亮，越像标出的图块。" } }],
      state: { step: "image" },
      en: "Now look at its tokens. Take the patch in {place}. Tokens next to it have a cosine of {neighbours} with it on average, all others {others}. {verdict}",
      zh: "现在看它的 token。取{place}的图块：与它相邻的 token 和它的余弦平均是 {neighbours}，其余的是 {others}。{verdict}",
    },
    {
      async facts(ask) { return { colours: await ask.colours() }; },
      figure: (_, { colours }) => [{ bytes: colours.data, size: colours.shape, caption: { en: "Like colours, like tokens.", zh: "颜色相近，token 相近。" } }],
      state: { step: "image" },
      en: "Each token has {width} numbers. Keep the three directions in which the {patches} patches differ most, and show them as red, green and blue. Parts with one colour are one kind of thing to this model.",
      zh: "每个 token 有 {width} 个数。取 {patches} 个图块差别最大的三个方向，显示成红、绿、蓝。颜色相同的部分，在这个模型眼里是同一类东西。",
    },
    {
      facts(_, { row, patches }) {
        const tenth = Math.max(1, Math.round(patches / 10)), best = strongest(row, tenth);
        return { tenth, share: percent(sum(best.map((i) => row[i])) / sum(row)), even: percent(tenth / patches) };
      },
      figure: (_, { row }) => [{ values: row, caption: { en: "Bright: much attention.", zh: "越亮，注意力越多。" } }],
      state: ({ depth, reader }) => ({ step: "softmax", layer: depth - 1, token: reader }),
      en: "Where does it look? In block {depth} the {tenth} patches that it looks at most get {share} of the attention that goes to patches; evenly it would be {even}. In large DINO models these maps outline the main thing in the image.",
      zh: "它看哪里？在第 {depth} 个 block 里，看得最多的 {tenth} 个图块分到了给图块的注意力的 {share}；平均分是 {even}。在大的 DINO 模型里，这种图能勾出画面的主体。",
    },
    {
      state: { step: "image" }, panel: "alike",
      en: "Such embeddings can be used as they are: the nearest images in a folder, a classifier from a few labels, parts of things without a mask. Try other patches: where do the borders lie?",
      zh: "这样的嵌入可以直接用：在文件夹里找最像的图片，用少量标签训练分类器，不用掩码就分出物体的各部分。换别的图块试试：边界在哪里？",
    },
  ],
};
