// MAE: a masked autoencoder (arXiv:2111.06377) hides most of the image and paints it.
import { percent } from "./draw.js";
import { decimal } from "./story_words.js";

const RATIOS = [25, 50, 75, 90];
const NORMALISED = {
  true: { en: "This model predicts each patch with its own brightness and contrast taken out; for the picture both are put back from the true patch.", zh: "这个模型预测的是去掉自身亮度和对比度之后的图块；画图时，这两样是从真实图块补回来的。" },
  false: { en: "The colours, too, are its own guess.", zh: "颜色也是它自己猜的。" },
};
const ERRORS = {
  rises: { en: "The less it sees, the worse it guesses.", zh: "看到的越少，猜得越差。" },
  mixed: { en: "On a single image the error need not rise step by step.", zh: "就一张图片而言，误差不一定一步步上升。" },
};
// One of the three images of a reconstruction: 0 the true one, 1 what is left of it, 2 what is painted.
function painting(caption, which, { pixels, shape: [, high, wide] }) {
  const bytes = Uint8Array.from(atob(pixels), (one) => one.charCodeAt(0)), count = 3 * high * wide;
  return { bytes: bytes.subarray(which * count, (which + 1) * count), size: [high, wide], caption };
}
const SEEN = { en: "what it sees", zh: "它看到的" }, PAINTED = { en: "what it paints", zh: "它画出的" }, TRUE = { en: "the image", zh: "原图" };

export const story = {
  name: "mae",
  title: { en: "MAE: learn by filling gaps", zh: "MAE：在填补空缺中学习" },
  summary: { en: "Hide three quarters of an image and paint them. No labels.", zh: "遮住图片的四分之三，再把它画出来。不需要标签。" },
  needs: { offers: ["painted"] },
  model: { en: "a masked autoencoder", zh: "掩码自编码器" },

  async facts(ask) {
    const { about } = ask, patches = about.grid[0] * about.grid[1], byRatio = await Promise.all(RATIOS.map((ratio) => ask.reconstruction({ percent: ratio, seed: 0 })));
    const painted = byRatio[RATIOS.indexOf(75)], hidden = [...painted.mask].filter((bit) => bit === "1").length, visible = patches - hidden;
    return { byRatio, painted, patches, hidden, visible, products: percent((visible / patches) ** 2), model: about.name, error: decimal(painted.error) };
  },

  scenes: [
    {
      figure: (_, { painted }) => [painting(TRUE, 0, painted), painting(SEEN, 1, painted)],
      state: { step: "image", heat: "none" },
      en: "{model} learned without a single label. Its exercise: hide most of an image, then paint what is missing. Any heap of photos will do to practise on.",
      zh: "{model} 没有用过一个标签。它的练习是：遮住图片的大部分，再把缺的画出来。随便一堆照片都能拿来练。",
    },
    {
      figure: (_, { painted }) => [painting(SEEN, 1, painted)],
      state: { step: "image", heat: "none" },
      en: "Here {hidden} of {patches} patches are hidden, chosen at random. The encoder gets the other {visible} and nothing in the gaps. That also makes it cheap: attention needs {products} of the products.",
      zh: "这里随机遮住了 {patches} 个图块中的 {hidden} 个。编码器只得到其余 {visible} 个，空缺处什么都不放。这也很省：注意力只需要 {products} 的点积。",
    },
    {
      figure: (_, { painted }) => [painting(SEEN, 1, painted)],
      state: { step: "image", heat: "none" },
      en: "Then comes the decoder, a smaller ViT. In every gap it puts the same learned token, told apart by its position only. From these and the encoder's tokens it has to paint.",
      zh: "接着是解码器，一个更小的 ViT。它在每个空缺处放同一个可学习的 token，彼此只靠位置区分。靠这些和编码器给出的 token，它要把画补全。",
    },
    {
      facts: ({ about }) => ({ normalised: NORMALISED[about.norm_pix] }),
      figure: (_, { painted }) => [painting(SEEN, 1, painted), painting(PAINTED, 2, painted), painting(TRUE, 0, painted)],
      state: { step: "image", heat: "none" },
      en: "This is what it paints. Where several things could be, a squared error is smallest for their mean: so it paints blurred. {normalised}",
      zh: "这就是它画出来的。可能性不止一种时，平方误差在取平均时最小，所以画面发糊。{normalised}",
    },
    {
      facts(_, { byRatio }) {
        const errors = byRatio.map(({ error }) => error);
        return { ...Object.fromEntries(RATIOS.map((ratio, i) => [`error${ratio}`, decimal(errors[i])])), trend: ERRORS[errors.every((error, i) => !i || error > errors[i - 1]) ? "rises" : "mixed"] };
      },
      figure: (_, { byRatio }) => RATIOS.map((ratio, i) => painting({ en: `${ratio} % hidden`, zh: `遮住 ${ratio} %` }, 2, byRatio[i])),
      state: { step: "image", heat: "none" },
      en: "How much can be missing? Error on the hidden patches with 25 % hidden: {error25}. 50 %: {error50}. 75 %: {error75}. 90 %: {error90}. {trend}",
      zh: "最多能缺多少？遮住 25 % 时，被遮图块上的误差是 {error25}；50 %：{error50}；75 %：{error75}；90 %：{error90}。{trend}",
    },
    {
      state: { step: "image", heat: "none" },
      en: "Language models such as BERT hide about 15 % of the words. Why does MAE hide 75 % of the patches?",
      zh: "BERT 这样的语言模型只遮住大约 15 % 的词。为什么 MAE 要遮住 75 % 的图块？",
      reveal: {
        en: "Images repeat themselves. A few gaps can be filled by copying from next door. Only when most is gone must the model know what things look like. In the paper 75 % worked well both for fine-tuning and for linear probes.",
        zh: "图片里重复的东西多。只缺几块，从旁边抄过来就行；大部分都没了，模型才必须知道东西长什么样。论文里，75 % 对微调和线性探测都很合适。",
      },
    },
    {
      state: { step: "image", heat: "none" },
      en: "Only the hidden patches count in the loss: to repeat what one sees is no exercise. On this image and mask the loss is {error}.",
      zh: "只有被遮住的图块计入损失：把看得见的再画一遍算不上练习。这张图、这个掩码的损失是 {error}。",
    },
    {
      state: { step: "image", heat: "none" }, panel: "mae",
      en: "After training the decoder is thrown away. The encoder stays, and a few labels are enough to fine-tune it. Now hide patches yourself: can you find one that it cannot guess?",
      zh: "训练完，解码器就扔掉了。留下的是编码器，再用少量标签微调即可。现在自己来遮图块：能找到一个它猜不出的吗？",
    },
  ],
};
