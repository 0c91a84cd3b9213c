"""Every mistake, written as a learner writes it, gets the hint made for it; the solutions pass.

The learner's code runs in this process here; tests/learn/test_process.py runs it as the command does.
"""

# ruff: noqa: E501  one learner, one line

from itertools import combinations

import pytest
import torch

from vitlab.learn.check import prepare
from vitlab.learn.child import examine
from vitlab.learn.exercises import EXERCISES
from vitlab.learn.grade import grade
from vitlab.learn.mistakes import candidate_mistakes, known_mistakes
from vitlab.learn.steps import close, distance, shape_in_letters


def verdict(tmp_path, name, code):
    exercise = EXERCISES[name]
    file = tmp_path / exercise.file
    file.write_text(code, encoding="utf-8")
    return grade(exercise, *examine(file, *prepare(exercise)))


def changed(name, *changes):
    """The solution with lines replaced: (old, new), (old, new), ..."""
    code = EXERCISES[name].solution()
    for old, new in changes:
        assert code.count(old) == 1, f"{old!r} is {code.count(old)} times in the solution of {name}"
        code = code.replace(old, new)
    return code


SCALE = " / d**0.5"
SPLIT = "qkv = self.qkv(x).reshape(B, N, 3, self.heads, d)  # eq. 5\n        q, k, v = qkv.permute(2, 0, 3, 1, 4)"
MERGE = "x.transpose(1, 2).reshape(B, N, D)"
GELU = "F.gelu(x)"
HALF1, HALF2 = "z = z + self.attention(self.norm1(z))", "return z + self.mlp(self.norm2(z))"
CUT = "x = images.reshape(B, C, H // P, P, W // P, P)\n        x = x.permute(0, 2, 4, 1, 3, 5)"
PERMUTE = "x.permute(0, 2, 4, 1, 3, 5)"
CONV = "self.proj = nn.Linear(channels * patch_size**2, width)"
CONV_IS = "self.proj = nn.Conv2d(channels, width, patch_size, patch_size)"
FLAT = "x = x.flatten(3).flatten(1, 2)  # (B, N, C*P*P)"
CAT, READ = "torch.cat([first, z], dim=1)", "self.norm(z)[:, 0]"
POSITIONS = "z = z + self.positions  # eq. 1"
BLOCKS = "for block in self.blocks:\n            z = block(z)"
OMEGA, WAVES = "-(torch.arange(D // 4) / (D // 4))", "[by_column.sin(), by_column.cos(), by_row.sin(), by_row.cos()]"
GRID = 'torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")'
SINCOS = f"row, column = {GRID}"
MAP, BICUBIC = "patches.reshape(1, *self.grid, -1).permute(0, 3, 1, 2)", 'size=(rows, columns), mode="bicubic"'
RESIZED = "return torch.cat([first, x.flatten(2).transpose(1, 2)], dim=1)"
SHOWN, KEPT = "n = int(N * (1 - self.mask_ratio))", "x = x.gather(1, order[:, :n, None].expand(-1, -1, x.shape[2]))"
BACK, FILLED = (
    "x = x.gather(1, restore[..., None].expand(-1, -1, x.shape[2]))",
    "x = torch.cat([x, self.mask_token.expand(B, N - n, -1)], dim=1)",
)
HIDDEN, LOSS = "hidden = (restore >= n).float()", "(error * hidden).sum() / hidden.sum()"
FILLING = "x = torch.cat([x, self.mask_token.expand(B, N - n, -1)], dim=1)  # (B, N, D), in another order"
IMAGES, TEXTS = "F.normalize(self.image_projection(images), dim=-1)", "F.normalize(self.text_projection(texts), dim=-1)"
BOTH = "(of_images + of_texts) / 2"

LEARNERS = [  # exercise, mistake, how a learner makes it
    ("patch-embed", "column order", [(PERMUTE, "x.permute(0, 4, 2, 1, 3, 5)")]),
    ("patch-embed", "channels last", [(PERMUTE, "x.permute(0, 2, 4, 3, 5, 1)")]),
    ("patch-embed", "patch transposed", [(PERMUTE, "x.permute(0, 2, 4, 1, 5, 3)")]),
    ("patch-embed", "no patches", [(PERMUTE, "x"), (FLAT, "x = x.reshape(B, -1, C * P * P)")]),
    ("patch-embed", "no patches, channels last", [(CUT, "x = images.movedim(1, 3)"), (FLAT, "x = x.reshape(B, -1, C * P * P)")]),
    ("patch-embed", "channels before patches", [(CUT, "x = images.unfold(2, P, P).unfold(3, P, P)"), (FLAT, "x = x.reshape(B, -1, C * P * P)")]),
    ("patch-embed", "unfold not transposed", [(CUT, "x = nn.functional.unfold(images, P, stride=P)"), (FLAT, "x = x.reshape(B, -1, C * P * P)")]),
    ("patch-embed", "tokens last", [(CONV, CONV_IS), (CUT, "x = images"), (FLAT, "pass"), ("self.proj(x)", "self.proj(x).flatten(2)")]),
    ("patch-embed", "reshaped, not transposed", [(CONV, CONV_IS), (CUT, "x = images"), (FLAT, "pass"), ("self.proj(x)", "self.proj(x).reshape(B, -1, self.proj.out_channels)")]),
    ("patch-embed", "no bias", [("self.proj(x)", "x @ self.proj.weight.T")]),
    ("attention", "no scale", [(SCALE, "")]),
    ("attention", "q q^T", [("q @ k.transpose", "q @ q.transpose")]),
    ("attention", "k k^T", [("q @ k.transpose", "k @ k.transpose")]),
    ("attention", "q v^T", [("q @ k.transpose", "q @ v.transpose")]),
    ("attention", "attention weights averaged", [("weights @ v", "weights.mean(dim=1, keepdim=True) @ v")]),
    ("attention", "heads averaged", [(MERGE, "x.mean(dim=1)")]),
    ("attention", "heads averaged and repeated", [(MERGE, "torch.cat([x.mean(dim=1)] * self.heads, dim=-1)"), ("from torch import", "import torch\nfrom torch import")]),
    ("attention", "heads summed", [(MERGE, "sum(x.unbind(1))")]),
    ("attention", "scale 1/d", [(SCALE, " / d")]),
    ("attention", "scale by the whole width", [(SCALE, " / D**0.5")]),
    ("attention", "scale by heads", [(SCALE, " / self.heads**0.5")]),
    ("attention", "scale by tokens", [(SCALE, " / k.shape[-2]**0.5")]),
    ("attention", "scale multiplied", [(SCALE, " * d**0.5")]),
    ("attention", "scale after softmax", [(SCALE, ""), ("softmax(dim=-1)", "softmax(dim=-1) / d**0.5")]),
    ("attention", "softmax over queries", [("softmax(dim=-1)", "softmax(dim=-2)")]),
    ("attention", "softmax over heads", [("softmax(dim=-1)", "softmax(dim=1)")]),
    ("attention", "softmax over the batch", [("softmax(dim=-1)", "softmax(dim=0)")]),
    ("attention", "no softmax", [("scores.softmax(dim=-1)", "scores")]),
    ("attention", "heads not transposed", [("qkv.permute(2, 0, 3, 1, 4)", "qkv.unbind(2)"), (MERGE, "x.reshape(B, N, D)")]),
    ("attention", "heads mixed in the split", [(SPLIT, "q, k, v = (t.reshape(B, self.heads, N, d) for t in self.qkv(x).chunk(3, -1))")]),
    ("attention", "heads split as (d, h)", [(SPLIT, "q, k, v = self.qkv(x).reshape(B, N, 3, d, self.heads).permute(2, 0, 4, 1, 3)")]),
    ("attention", "q, k, v inside the heads", [(SPLIT, "q, k, v = self.qkv(x).reshape(B, N, self.heads, 3 * d).transpose(1, 2).chunk(3, -1)")]),
    ("attention", "one head", [("d = D // self.heads", "self.heads = 1; d = D")]),
    ("attention", "k, q, v", [("q, k, v = qkv", "k, q, v = qkv")]),
    ("attention", "q, v, k", [("q, k, v = qkv", "q, v, k = qkv")]),
    ("attention", "v, k, q", [("q, k, v = qkv", "v, k, q = qkv")]),
    ("attention", "causal mask", [("softmax(dim=-1)", "masked_fill(scores.new_ones(N, N).tril() == 0, -1e9).softmax(dim=-1)")]),
    ("attention", "weights transposed", [("weights @ v", "weights.mT @ v")]),
    ("attention", "heads mixed in the merge", [(MERGE, "x.reshape(B, N, D)")]),
    ("attention", "heads interleaved", [(MERGE, "x.permute(0, 2, 3, 1).reshape(B, N, D)")]),
    ("attention", "no output projection", [("self.proj(x)", "x")]),
    ("attention", "residual inside", [("B, N, D = x.shape", "B, N, D = x.shape; start = x"), ("self.proj(x)", "start + self.proj(x)")]),
    ("mlp", "GELU by tanh", [(GELU, 'F.gelu(x, approximate="tanh")')]),
    ("mlp", "ReLU", [(GELU, "F.relu(x)")]),
    ("mlp", "QuickGELU", [(GELU, "x * (1.702 * x).sigmoid()")]),
    ("mlp", "SiLU", [(GELU, "F.silu(x)")]),
    ("mlp", "sigmoid", [(GELU, "x.sigmoid()")]),
    ("mlp", "tanh", [(GELU, "x.tanh()")]),
    ("mlp", "no nonlinearity", [(GELU, "x")]),
    ("mlp", "nonlinearity before fc1", [(GELU, "x"), ("self.fc1(x)", "self.fc1(F.gelu(x))")]),
    ("mlp", "nonlinearity after fc2", [(GELU, "x"), ("self.fc2(x)", "F.gelu(self.fc2(x))")]),
    ("mlp", "nonlinearity twice", [("self.fc2(x)", "F.gelu(self.fc2(x))")]),
    ("mlp", "residual inside", [("x = self.fc1(x)", "start, x = x, self.fc1(x)"), ("self.fc2(x)", "start + self.fc2(x)")]),
    ("block", "post-norm", [(HALF1, "z = self.norm1(z + self.attention(z))"), (HALF2, "return self.norm2(z + self.mlp(z))")]),
    ("block", "norm after the branch", [(HALF1, "z = z + self.norm1(self.attention(z))"), (HALF2, "return z + self.norm2(self.mlp(z))")]),
    ("block", "no norms", [("self.norm1(z)", "z"), ("self.norm2(z)", "z")]),
    ("block", "no norm1", [("self.norm1(z)", "z")]),
    ("block", "no norm2", [("self.norm2(z)", "z")]),
    ("block", "norm1 twice", [("self.norm2(z)", "self.norm1(z)")]),
    ("block", "norms swapped", [("self.norm1(z)", "self.norm9(z)"), ("self.norm2(z)", "self.norm1(z)"), ("self.norm9(z)", "self.norm2(z)")]),
    ("block", "no residuals", [("z = z + ", "z = "), ("return z + ", "return ")]),
    ("block", "no residual of the attention", [("z = z + ", "z = ")]),
    ("block", "no residual of the MLP", [("return z + ", "return ")]),
    ("block", "residual from the norm", [(HALF1, "z = self.norm1(z); z = z + self.attention(z)"), (HALF2, "z = self.norm2(z); return z + self.mlp(z)")]),
    ("block", "residual from the input", [(HALF1, "x = z + self.attention(self.norm1(z))"), (HALF2, "return z + self.mlp(self.norm2(x))")]),
    ("block", "MLP first", [(HALF1, "z = z + self.mlp(self.norm2(z))"), (HALF2 + "  # eq. 3", "return z + self.attention(self.norm1(z))")]),
    ("block", "side by side", [(HALF1, "pass"), (HALF2, "return z + self.attention(self.norm1(z)) + self.mlp(self.norm2(z))")]),
    ("block", "no MLP", [(HALF2, "return z")]),
    ("block", "no attention", [(HALF1, "pass")]),
    ("block", "eps 1e-5", [("self.norm1 = nn.LayerNorm(width, eps=1e-6)", "self.norm1 = nn.LayerNorm(width)"), ("self.norm2 = nn.LayerNorm(width, eps=1e-6)", "self.norm2 = nn.LayerNorm(width)")]),
    ("block", "eps 1e-12", [("self.norm1 = nn.LayerNorm(width, eps=1e-6)", "self.norm1 = nn.LayerNorm(width, 1e-12)"), ("self.norm2 = nn.LayerNorm(width, eps=1e-6)", "self.norm2 = nn.LayerNorm(width, 1e-12)")]),
    ("vit", "class token last", [(CAT, "torch.cat([z, first], dim=1)")]),
    ("vit", "class token last, read last", [(CAT, "torch.cat([z, first], dim=1)"), ("[:, 0]", "[:, -1]")]),
    ("vit", "class token of zeros", [("self.class_token.expand(z.shape[0], -1, -1)", "z.new_zeros(z.shape[0], 1, z.shape[2])")]),
    ("vit", "no class token", [(CAT, "z"), (POSITIONS, "z = z + self.positions[:, 1:]")]),
    ("vit", "no positions", [(POSITIONS, "pass")]),
    ("vit", "positions before the class token", [(CAT, "torch.cat([first, z + self.positions[:, 1:]], dim=1)"), (POSITIONS, "pass")]),
    ("vit", "positions shifted", [(CAT, "torch.cat([first, z + self.positions[:, :z.shape[1]]], dim=1)"), (POSITIONS, "pass")]),
    ("vit", "positions twice", [(POSITIONS, "z = z + self.positions + self.positions")]),
    ("vit", "positions in every block", [(POSITIONS, "pass"), ("z = block(z)", "z = block(z + self.positions)")]),
    ("vit", "first block only", [(BLOCKS, "z = self.blocks[0](z)")]),
    ("vit", "last block only", [(BLOCKS, "for block in self.blocks:\n            out = block(z)\n        z = out")]),
    ("vit", "last block missing", [("in self.blocks:", "in self.blocks[:-1]:")]),
    ("vit", "first block repeated", [("z = block(z)", "z = self.blocks[0](z)")]),
    ("vit", "no blocks", [("z = block(z)", "block(z)")]),
    ("vit", "blocks reversed", [("in self.blocks:", "in reversed(self.blocks):")]),
    ("vit", "no final norm", [(READ, "z[:, 0]")]),
    ("vit", "norm before the blocks", [(POSITIONS, "z = self.norm(z + self.positions)"), (READ, "z[:, 0]")]),
    ("vit", "norm after every block", [("z = block(z)", "z = self.norm(block(z))"), (READ, "z[:, 0]")]),
    ("vit", "mean of all tokens", [(READ, "self.norm(z).mean(dim=1)")]),
    ("vit", "mean of the patches", [(READ, "self.norm(z)[:, 1:].mean(dim=1)")]),
    ("vit", "largest of all tokens", [(READ, "self.norm(z).max(dim=1).values")]),
    ("vit", "last token read", [("[:, 0]", "[:, -1]")]),
    ("vit", "every token read", [("[:, 0]", "")]),
    ("vit", "no head", [("self.head(y)", "y")]),
    ("vit", "softmax at the end", [("self.head(y)", "self.head(y).softmax(dim=-1)")]),
    ("vit", "log-softmax at the end", [("self.head(y)", "self.head(y).log_softmax(dim=-1)")]),
    ("positions", "one number per place", [(SINCOS, "p = torch.arange(rows * columns).reshape(-1, 1) * 10000 ** -(torch.arange(D // 2) / (D // 2)); row = column = torch.zeros(1)"), (WAVES, "[p.sin(), p.cos()]")]),
    ("positions", "one number per place, interleaved", [(SINCOS, "p = torch.arange(rows * columns).reshape(-1, 1) * 10000 ** -(torch.arange(0, D, 2) / D); row = column = torch.zeros(1)"), (f"torch.cat({WAVES}, dim=1)", "torch.stack([p.sin(), p.cos()], dim=2).reshape(-1, D)")]),
    ("positions", "row first", [(WAVES, "[by_row.sin(), by_row.cos(), by_column.sin(), by_column.cos()]")]),
    ("positions", "column by column", [(GRID, GRID.replace("ij", "xy"))]),
    ("positions", "sines and cosines in turn", [(f"torch.cat({WAVES}, dim=1)", "torch.cat([torch.stack([a.sin(), a.cos()], 2).flatten(1) for a in (by_column, by_row)], dim=1)")]),
    ("positions", "cosines first", [(WAVES, "[by_column.cos(), by_column.sin(), by_row.cos(), by_row.sin()]")]),
    ("positions", "exponent by D/2", [(OMEGA, "-(2 * torch.arange(D // 4) / D)")]),
    ("positions", "counted from 1", [(GRID, "torch.meshgrid(torch.arange(1, rows + 1), torch.arange(1, columns + 1), indexing=\"ij\")")]),
    ("positions", "bilinear", [("bicubic", "bilinear")]),
    ("positions", "nearest", [(BICUBIC, "size=(rows, columns)")]),
    ("positions", "antialiased", [(BICUBIC, BICUBIC + ", antialias=True")]),
    ("positions", "corners aligned", [(BICUBIC, BICUBIC + ", align_corners=True")]),
    ("positions", "resized as a line", [(MAP, "patches.transpose(1, 2)"), (BICUBIC, "size=rows * columns, mode=\"linear\"")]),
    ("positions", "class token resized too", [(MAP, "self.table.transpose(1, 2)"), (BICUBIC, "size=1 + rows * columns, mode=\"linear\""), (RESIZED, "return x.transpose(1, 2)")]),
    ("positions", "class token's position lost", [("[first, x.", "[0 * first, x.")]),
    ("positions", "old grid from a square root", [("*self.grid, -1", "int(patches.shape[1] ** 0.5), int(patches.shape[1] ** 0.5), -1")]),
    ("positions", "old grid turned", [("*self.grid, -1", "*self.grid[::-1], -1")]),
    ("positions", "new grid turned", [("size=(rows, columns)", "size=(columns, rows)")]),
    ("positions", "to a map without permute", [(MAP, "patches.reshape(1, -1, *self.grid)")]),
    ("positions", "from a map without permute", [("x.flatten(2).transpose(1, 2)", "x.reshape(1, rows * columns, -1)")]),
    ("mae-masking", "loss over all patches", [(LOSS, "error.mean()")]),
    ("mae-masking", "loss over the visible patches", [(HIDDEN, "hidden = (restore < n).float()")]),
    ("mae-masking", "divided by N", [(LOSS, "(error * hidden).mean()")]),
    ("mae-masking", "not averaged", [(LOSS, "(error * hidden).sum()")]),
    ("mae-masking", "mask in shuffled order", [(HIDDEN, "hidden = torch.ones(B, N); hidden[:, :n] = 0")]),
    ("mae-masking", "order not restored", [(BACK, "pass")]),
    ("mae-masking", "order not restored, sorted", [(KEPT, KEPT.replace("order[:, :n, None]", "order[:, :n].sort(dim=1).values[..., None]")), (BACK, "pass")]),
    ("mae-masking", "restored by the order itself", [(BACK, BACK.replace("restore", "order"))]),
    ("mae-masking", "highest noise stays", [("noise.argsort(dim=1)", "noise.argsort(dim=1, descending=True)")]),
    ("mae-masking", "ratio inverted", [(SHOWN, "n = int(N * self.mask_ratio)")]),
    ("mae-masking", "rounded up", [(SHOWN, "n = N - int(N * self.mask_ratio)")]),
    ("mae-masking", "one mask for the batch", [("noise.argsort(dim=1)", "noise[0].argsort().repeat(B, 1)")]),
    ("mae-masking", "no positions in the encoder", [(" + self.positions ", "")]),
    ("mae-masking", "positions after hiding", [(" + self.positions ", ""), ("self.encoder(x)", "self.encoder(x + self.positions[:, :n])")]),
    ("mae-masking", "encoder sees everything", [("self.embed(patches) + self.positions", "self.encoder(self.embed(patches) + self.positions)"), ("x = self.encoder(x)", "pass")]),
    ("mae-masking", "mask tokens in the encoder", [("self.embed(patches) + self.positions", "torch.where((restore >= n)[..., None], self.mask_token, self.embed(patches)) + self.positions"), (KEPT, "pass"), (FILLING, "pass"), (BACK, "pass")]),
    ("mae-masking", "zeros for hidden patches", [("self.mask_token.expand(B, N - n, -1)", "x.new_zeros(B, N - n, x.shape[2])")]),
    ("mae-masking", "no positions in the decoder", [("x + self.decoder_positions", "x")]),
    ("mae-masking", "decoder positions too early", [(FILLED, FILLED + " + self.decoder_positions"), ("self.decoder(x + self.decoder_positions)", "self.decoder(x)")]),
    ("mae-masking", "targets normalised", [("- patches)", "- (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6) ** 0.5)")]),
    ("mae-masking", "values summed", [(".mean(dim=-1)", ".sum(dim=-1)")]),
    ("mae-masking", "absolute error", [(".square()", ".abs()")]),
    ("clip-loss", "images to texts only", [(BOTH, "of_images")]),
    ("clip-loss", "texts to images only", [("F.cross_entropy(logits, own)", "F.cross_entropy(logits.mT, own)  ")]),
    ("clip-loss", "not halved", [(BOTH, "of_images + of_texts")]),
    ("clip-loss", "not normalised", [(IMAGES, "self.image_projection(images)"), (TEXTS, "self.text_projection(texts)")]),
    ("clip-loss", "texts not normalised", [(TEXTS, "self.text_projection(texts)")]),
    ("clip-loss", "images not normalised", [(IMAGES, "self.image_projection(images)")]),
    ("clip-loss", "normalised before the projection", [(IMAGES, "self.image_projection(F.normalize(images, dim=-1))"), (TEXTS, "self.text_projection(F.normalize(texts, dim=-1))")]),
    ("clip-loss", "normalised over the batch", [(IMAGES, IMAGES.replace("-1", "0")), (TEXTS, TEXTS.replace("-1", "0"))]),
    ("clip-loss", "normalised by absolute values", [(IMAGES, IMAGES.replace("dim", "p=1, dim")), (TEXTS, TEXTS.replace("dim", "p=1, dim"))]),
    ("clip-loss", "normalised by the squared length", [(IMAGES, "self.image_projection(images); I_e = I_e / (I_e * I_e).sum(-1, keepdim=True)"), (TEXTS, "self.text_projection(texts); T_e = T_e / (T_e * T_e).sum(-1, keepdim=True)")]),
    ("clip-loss", "softmax for a norm", [(IMAGES, "self.image_projection(images).softmax(-1)"), (TEXTS, "self.text_projection(texts).softmax(-1)")]),
    ("clip-loss", "no scale", [("self.log_scale.exp() * ", "")]),
    ("clip-loss", "logarithm of the scale", [("self.log_scale.exp()", "self.log_scale")]),
    ("clip-loss", "divided by the scale", [("self.log_scale.exp() * I_e @ T_e.mT", "I_e @ T_e.mT / self.log_scale.exp()")]),
    ("clip-loss", "divided by the logarithm", [("self.log_scale.exp() * I_e @ T_e.mT", "I_e @ T_e.mT / self.log_scale")]),
    ("clip-loss", "softmax twice", [("F.cross_entropy(logits, own)", "F.cross_entropy(logits.softmax(dim=-1), own)"), ("F.cross_entropy(logits.mT, own)", "F.cross_entropy(logits.mT.softmax(dim=-1), own)")]),
    ("clip-loss", "softmax over the whole matrix", [(BOTH, "-(logits.exp() / logits.exp().sum()).log().trace() / len(logits)")]),
    ("clip-loss", "no negatives", [(BOTH, "-logits.trace() / len(logits)")]),
    ("clip-loss", "sigmoid loss", [(BOTH, "F.binary_cross_entropy_with_logits(logits, torch.eye(len(logits)), reduction=\"sum\") / len(logits)")]),
    ("clip-loss", "summed over the batch", [("(logits, own)", "(logits, own, reduction=\"sum\")"), ("(logits.mT, own)", "(logits.mT, own, reduction=\"sum\")")]),
]  # fmt: skip


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name, tmp_path):
    found = verdict(tmp_path, name, EXERCISES[name].solution())
    assert found.passed and found.keys == ["passed"]


@pytest.mark.parametrize(("name", "mistake", "changes"), LEARNERS, ids=[f"{n}: {m}" for n, m, _ in LEARNERS])
def test_each_mistake_gets_its_hint(name, mistake, changes, tmp_path):
    found = verdict(tmp_path, name, changed(name, *changes))
    assert not found.passed and found.mistakes == [mistake]
    hint = next(m for m in known_mistakes(name) if m.name == mistake)
    assert hint.en in found.lines("en") and hint.zh in found.lines("zh")


def test_attention_over_the_batch(tmp_path):
    code = changed(
        "attention",
        ("B, N, D = x.shape", "return self.as_torch(x)\n        B, N, D = x.shape"),
    ) + '''
    def as_torch(self, x):
        y, _ = nn.functional.multi_head_attention_forward(
            x, x, x, x.shape[-1], self.heads, self.qkv.weight, self.qkv.bias, None, None, False, 0.0,
            self.proj.weight, self.proj.bias, training=False)
        return y
'''  # fmt: skip
    assert verdict(tmp_path, "attention", code).mistakes == ["attention over the batch"]
    right = code.replace("(\n            x, x, x,", "(\n            *[x.transpose(0, 1)] * 3,").replace(
        "return y\n", "return y.transpose(0, 1)\n"
    )
    assert verdict(tmp_path, "attention", right).passed


def test_every_known_mistake_is_written_by_some_learner():
    written = {(name, mistake) for name, mistake, _ in LEARNERS} | {("attention", "attention over the batch")}
    assert written == {(name, m.name) for name in EXERCISES for m in known_mistakes(name)}


@pytest.mark.parametrize("name", EXERCISES)
def test_no_two_mistakes_have_the_same_numbers(name):
    cases = EXERCISES[name].all_cases()
    fitting = [m for m in known_mistakes(name) if cases[-1].last_step_before_error(**m.options) is None]
    found = {m.name: [case.variant(**m.options) for case in cases] for m in fitting}
    truth = [case.ours()[0] for case in cases]
    for mistake, outputs in found.items():
        far = max(map(distance, outputs, truth))
        assert far > 1e-4, mistake  # ten times what a hint may be off by
    for a, b in combinations(found, 2):
        assert not all(map(close, found[a], found[b])), (a, b)


@pytest.mark.parametrize("name", EXERCISES)
def test_without_options_the_variants_are_the_layers(name):
    for case in EXERCISES[name].all_cases():
        torch.testing.assert_close(case.variant(), case.ours()[0], rtol=1e-5, atol=1e-5)
        steps = case.steps()
        assert list(steps) and torch.equal(list(steps.values())[-1], case.variant())


def test_the_attention_of_the_variants_is_torchs():
    case = EXERCISES["attention"].case(0)
    w, D, h = case.weights, case.sizes["D"], case.sizes["h"]
    theirs = torch.nn.MultiheadAttention(D, h, batch_first=True)
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj.weight": "proj.weight"}
    theirs.load_state_dict({**{a: w[b] for a, b in names.items()}, "out_proj.bias": w["proj.bias"]})
    y, weights = theirs(*case.inputs * 3, average_attn_weights=False)
    torch.testing.assert_close(case.variant(), y)
    torch.testing.assert_close(case.steps()["weights"], weights)


def test_two_mistakes_at_once(tmp_path):
    code = changed("attention", (SCALE, ""), (MERGE, "x.reshape(B, N, D)"))
    found = verdict(tmp_path, "attention", code)
    assert found.mistakes == ["no scale", "heads mixed in the merge"] and "measured two" in found.keys
    assert sum(len(pair) == 2 for pair in candidate_mistakes("attention")) > 100


@pytest.mark.parametrize(
    ("name", "changes", "last", "first"),
    [
        ("attention", [(SCALE, " / d**0.5 - q.sum(-1, keepdim=True)"), ("/ d**0.5 -", "/ d**0.3 -")], "v", "scores"),
        ("attention", [("weights @ v", "weights @ (v * v)")], "weights", "heads"),
        ("attention", [("self.qkv(x)", "self.qkv(x * x)")], None, "qkv"),
        ("attention", [("self.proj(x)", "self.proj(x) + x.mean()")], "proj", None),
        ("mlp", [(GELU, "F.gelu(1.1 * x)")], "fc1", "activation"),
        ("block", [("self.mlp(self.norm2(z))", "self.mlp(self.norm2(z)).sin()")], "mlp", "eq. 3"),
        ("patch-embed", [("self.proj(x)", "self.proj(x.flip(-1))")], "patches", "tokens"),
        ("positions", [("10000", "1000")], None, "sincos"),
        ("positions", [("return torch.cat([first, x", "return torch.cat([first, 2 * x")], "resized", "table"),
        ("mae-masking", [("self.decoder(x + ", "self.decoder(x - ")], "restored", "prediction"),
        ("mae-masking", [("x = self.encoder(x)", "x = self.encoder(x).relu()")], "embedded", "restored"),
        ("clip-loss", [("* I_e @ T_e.mT", "* (I_e @ T_e.mT) ** 2")], "T_e", "logits"),
        ("clip-loss", [(BOTH, "torch.maximum(of_images, of_texts)")], "logits", "loss"),
    ],
)
def test_an_unknown_mistake_is_measured_and_its_step_named(name, changes, last, first, tmp_path):
    found = verdict(tmp_path, name, changed(name, *changes))
    assert not found.passed and not found.mistakes
    said = {key: value for remark in found.remarks for key, value in remark.values.items()}
    assert (said.get("last"), said.get("step")) == (last, first)
    assert said["relative"] > 1e-5 and "difference" in found.keys


def test_a_fused_kernel_or_a_loop_over_heads_hides_no_step(tmp_path):
    """Scores and weights are nowhere then, but the steps after them are."""
    fused = changed(
        "attention",
        ("weights @ v", "nn.functional.scaled_dot_product_attention(q, k, v)"),
        ("self.proj(x)", "self.proj(x) * x.exp()"),
    )
    fused = fused.replace("weights = scores.softmax(dim=-1)", "weights = None").replace(
        "scores = q @ k.transpose(-2, -1) / d**0.5", ""
    )
    found = verdict(tmp_path, "attention", fused)
    assert [r.values.get("last") for r in found.remarks if r.key == "after all"] == ["proj"]


def test_scale_order_and_axes_are_told_apart(tmp_path):
    scaled = verdict(tmp_path, "attention", changed("attention", ("self.proj(x)", "3 * self.proj(x)")))
    assert scaled.keys[1] == "scaled" and scaled.remarks[1].values["factor"] == pytest.approx(3)
    flipped = verdict(tmp_path, "mlp", changed("mlp", ("self.fc2(x)", "self.fc2(x).flip(1)")))
    assert flipped.keys[1] == "shuffled"
    turned = verdict(tmp_path, "mlp", changed("mlp", ("self.fc2(x)", "self.fc2(x).mT")))
    assert turned.keys[1] == "axes" and "(B, D, N) = (2, 15, 7)" in turned.lines("en")[1]
    short = verdict(tmp_path, "mlp", changed("mlp", ("self.fc2(x)", "self.fc2(x)[:, :, :4]")))
    assert short.keys[1] == "shape" and "(2, 7, 4)" in short.lines("zh")[1]
    halved = verdict(tmp_path, "attention", changed("attention", (SCALE, " / (2 * d**0.5)")))
    assert any(r.key == "step scaled" and r.values["factor"] == pytest.approx(0.5) for r in halved.remarks)


def test_what_right_numbers_can_still_hide(tmp_path):
    for change, key in [
        (("F.gelu(x)", "F.gelu(x.detach())"), "no gradient"),
        (("F.gelu(x)", "F.gelu(x) * 0.5 + F.gelu(x).detach() * 0.5"), "other gradient"),
        (("F.gelu(x)", "F.dropout(F.gelu(x), 0.5)"), "difference"),
    ]:
        assert verdict(tmp_path, "mlp", changed("mlp", change)).keys[1] == key
    inplace = changed("block", (HALF1, "z += self.attention(self.norm1(z))"))
    assert verdict(tmp_path, "block", inplace).keys == ["not passed", "input changed"]
    fixed = verdict(tmp_path, "mlp", changed("mlp", ("self.fc2(x)", "self.fc2(x) if len(x) == 2 else x[..., :8]")))
    assert "one case" in fixed.keys and "B=1" in fixed.lines("en")[2]


def test_other_right_ways_pass_too(tmp_path):
    """Visible patches in rising order and scattered back; log-softmaxes along both axes; float64 sines."""
    scattered = changed(
        "mae-masking",
        ("order[:, :n, None].expand(-1, -1, x.shape[2]))", "(keep := order[:, :n].sort().values[..., None]).expand(-1, -1, x.shape[2]))"),
        ("x = torch.cat([x, self.mask_token.expand(B, N - n, -1)], dim=1)", "full = self.mask_token.repeat(B, N, 1)"),
        (BACK, "x = full.scatter(1, keep.expand_as(x), x)"),
        (LOSS, "error[restore >= n].mean()"),
    )  # fmt: skip
    assert verdict(tmp_path, "mae-masking", scattered).passed
    by_hand = "-(logits.log_softmax(0).trace() + logits.log_softmax(1).trace()) / (2 * len(logits))"
    assert verdict(tmp_path, "clip-loss", changed("clip-loss", (BOTH, by_hand))).passed
    exact = changed("positions", ("torch.arange(D // 4) /", "torch.arange(D // 4, dtype=torch.float64) /"), ("table])[None]", "table.float()])[None]"))  # fmt: skip
    assert verdict(tmp_path, "positions", exact).passed


def test_a_loss_alone_is_no_multiple_of_another(tmp_path):
    """Any number is a multiple of any other: that says nothing."""
    found = verdict(tmp_path, "clip-loss", changed("clip-loss", (BOTH, "1.7 * of_images")))
    assert not found.passed and "scaled" not in found.keys and "difference" in found.keys


def test_own_layers_of_earlier_exercises_can_be_imported(tmp_path):
    for name in ("attention", "mlp"):
        (tmp_path / f"{name}.py").write_text(EXERCISES[name].solution(), encoding="utf-8")
    code = changed(
        "block",
        ("from vitlab.layers.attention import Attention", "from attention import Attention"),
        ("from vitlab.layers.block import MLP", "from mlp import MLP"),
    )
    assert verdict(tmp_path, "block", code).passed


def test_a_convolution_is_as_good_as_a_matrix(tmp_path):
    code = changed(
        "patch-embed",
        (CONV, CONV_IS),
        (CUT, "x = images"),
        (FLAT, "pass"),
        ("self.proj(x)", "self.proj(x).flatten(2).transpose(1, 2)"),
    )
    assert verdict(tmp_path, "patch-embed", code).passed


def test_letters_of_shapes():
    sizes = EXERCISES["vit"].cases[0]
    assert shape_in_letters((2, 36, 15), sizes) == "(B, N + 1, D) = (2, 36, 15)"
    assert shape_in_letters((2, 37), sizes) == "(2, 37)"
    for exercise in EXERCISES.values():
        lengths = [n for letter, n in exercise.cases[0].items() if letter != "L"]
        assert len(set(lengths)) == len(lengths) or exercise.name == "vit"
