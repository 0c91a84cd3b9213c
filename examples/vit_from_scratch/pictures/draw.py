"""Draws the pictures of README.md and README.zh-CN.md: architecture, block and attention, as SVG in two languages.

python pictures/draw.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

OUT = Path(__file__).parent
CAT = OUT.parent / "cat.jpg"
INK, SOFT, LINE = "#1f2937", "#6b7280", "#9ca3af"
BLUE, GREEN, ORANGE, PURPLE, RED = "#dbeafe", "#dcfce7", "#ffedd5", "#ede9fe", "#fee2e2"
EDGE = {BLUE: "#3b82f6", GREEN: "#22c55e", ORANGE: "#f97316", PURPLE: "#8b5cf6", RED: "#ef4444"}
FONT = "system-ui, 'Segoe UI', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', 'WenQuanYi Micro Hei', sans-serif"


class Picture:
    def __init__(self, width: int, height: int, language: int):
        self.width, self.height, self.language = width, height, language
        self.parts: list[str] = []

    def text(self, x: float, y: float, *texts: str, size: int = 13, color: str = INK, mono: bool = False, bold=False):
        """One text for both languages, or English and Chinese; centred."""
        text = texts[self.language % len(texts)].replace("&", "&amp;").replace("<", "&lt;")
        font = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="middle"{font}{weight}>{text}</text>'
        )

    def shape(self, x: float, y: float, text: str):
        self.text(x, y, text, size=11, color=SOFT, mono=True)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, radius: float = 4, edge: str | None = None):
        stroke = edge or EDGE.get(fill)
        border = f' stroke="{stroke}"' if stroke else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}" fill="{fill}"{border}/>')

    def box(self, x: float, y: float, w: float, h: float, fill: str, *texts: str, size: int = 13):
        self.rect(x, y, w, h, fill)
        self.text(x + w / 2, y + h / 2 + size * 0.35, *texts, size=size)

    def path(self, d: str, arrow: bool = True, color: str = SOFT):
        marker = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path d="{d}" fill="none" stroke="{color}" stroke-width="1.5"{marker}/>')

    def arrow(self, x: float, y: float, x2: float, y2: float | None = None):
        self.path(f"M{x} {y}L{x2} {y if y2 is None else y2}")

    def plus(self, x: float, y: float):
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="10" fill="white" stroke="{INK}" stroke-width="1.5"/>')
        self.path(f"M{x - 5} {y}H{x + 5}M{x} {y - 5}V{y + 5}", arrow=False, color=INK)

    def save(self, name: str):
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" font-family="{FONT}">'
        ground = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        suffix = ("en", "zh")[self.language]
        content = "\n".join([head, tip, ground, *self.parts, "</svg>\n"])
        (OUT / f"{name}.{suffix}.svg").write_text(content, encoding="utf-8")


def cat(cells: int) -> np.ndarray:
    """(cells, cells, 3)"""
    return np.asarray(Image.open(CAT).resize((cells, cells), Image.Resampling.BOX))


def mosaic(p: Picture, x: float, y: float, cells: np.ndarray, side: float, patch: int = 0, gap: float = 0):
    """Coloured squares; with `patch`, a gap after so many of them."""
    for (row, column), _ in np.ndenumerate(cells[..., 0]):
        red, green, blue = (int(v) // 17 for v in cells[row, column])
        left = x + column * side + (column // patch * gap if patch else 0)
        top = y + row * side + (row // patch * gap if patch else 0)
        p.parts.append(f'<path fill="#{red:x}{green:x}{blue:x}" d="M{left:g} {top:g}h{side}v{side}h-{side}z"/>')


def tokens(p: Picture, x: float, y: float, h: float, *, read: bool = False):
    """A class token, some patch tokens, dots, and the last: 110 wide."""
    for i in range(9):
        if i == 7:
            p.text(x + i * 12 + 5, y + h / 2, "…", color=SOFT)
            continue
        p.rect(x + i * 12, y, 9, h, RED if i == 0 else BLUE, 2, edge=LINE if read and i else None)


def architecture(language: int):
    p = Picture(1120, 300, language)
    cells = cat(28)
    mosaic(p, 16, 90, cells, 4)
    p.text(72, 76, "image", "图片", bold=True)
    p.shape(72, 222, "(3, 224, 224)")
    p.arrow(136, 146, 164)
    mosaic(p, 170, 78, cells, 4, patch=2, gap=1.8)
    p.text(238, 66, "14 × 14 patches", "14 × 14 个图块", bold=True)
    p.shape(238, 232, "(196, 3·16·16)")
    p.arrow(312, 146, 340)
    p.box(346, 86, 76, 120, GREEN, "× E", size=15)
    p.text(384, 66, "PatchEmbed", bold=True)
    p.text(384, 222, "one matrix for all", "所有图块共用", size=11, color=SOFT)
    p.shape(384, 238, "(768, 768)")
    p.arrow(426, 146, 454)
    tokens(p, 460, 86, 120)
    p.text(514, 66, "tokens", "token", bold=True)
    p.path("M464.5 209V221H470", arrow=False, color="#b91c1c")
    p.text(502, 225, "class token", "类别 token", size=11, color="#b91c1c")
    p.shape(514, 244, "(1 + 196, 768)")
    p.arrow(572, 146, 594)
    p.plus(606, 146)
    p.text(606, 66, "E_pos", bold=True)
    p.path("M606 76V134")
    p.text(606, 176, "positions", "位置编码", size=11, color=SOFT)
    p.shape(606, 192, "(197, 768)")
    p.text(606, 284, "eq. 1", "式 1", size=12, color=SOFT)
    p.arrow(618, 146, 652)
    for offset in (12, 6, 0):
        p.rect(660 + offset, 92 - offset, 130, 118, PURPLE, 6)
    p.text(725, 130, "Block", bold=True)
    p.text(725, 152, "attention, MLP", "注意力、MLP", size=12)
    p.text(725, 174, "see below", "见下图", size=11, color=SOFT)
    p.text(731, 66, "× 12", bold=True)
    p.shape(725, 228, "(197, 768)")
    p.text(725, 284, "eqs. 2-3", "式 2-3", size=12, color=SOFT)
    p.arrow(806, 146, 832)
    p.box(838, 112, 46, 68, ORANGE, "LN")
    p.arrow(888, 146, 912)
    tokens(p, 918, 112, 68, read=True)
    p.path("M922.5 108C922.5 88 950 86 1032 86", color="#b91c1c")
    p.text(970, 76, "read: class token", "只读类别 token", size=11, color="#b91c1c")
    p.shape(972, 198, "(768,)")
    p.text(920, 284, "eq. 4", "式 4", size=12, color=SOFT)
    p.box(1038, 64, 66, 40, GREEN, "head", "分类头")
    p.arrow(1071, 108, 1071, 132)
    p.text(1071, 150, "1000 logits")
    for i, h in enumerate((8, 14, 44, 10, 5)):
        p.rect(1046 + i * 11, 206 - h, 8, h, RED if h == 44 else BLUE, 1)
    p.text(1071, 222, "“cat”", "“猫”", size=12)
    p.text(
        238, 284, "one patch = one token of D = 768 numbers", "一个图块 = 一个 token，D = 768 个数", size=12, color=SOFT
    )
    p.text(560, 30, "VisionTransformer: ViT-B/16", bold=True, size=15)
    p.save("architecture")


def block(language: int):
    p = Picture(1120, 230, language)
    y = 120
    p.text(560, 26, "Block", bold=True, size=15)
    p.text(58, y - 6, "z", bold=True, size=15)
    p.shape(58, y + 14, "(N, D)")
    p.arrow(84, y, 150)
    p.box(154, y - 20, 84, 40, ORANGE, "norm1")
    p.arrow(242, y, 272)
    p.box(276, y - 28, 130, 56, PURPLE, "Attention")
    p.text(341, y + 48, "tokens read each other", "token 之间互相读取", size=11, color=SOFT)
    p.arrow(410, y, 452)
    p.plus(466, y)
    p.path(f"M110 {y}V66H466V{y - 12}")
    p.text(288, 58, "residual path: nothing in the way", "残差通路：一路畅通", size=11, color=SOFT)
    p.text(288, 204, "eq. 2:  z' = z + Attention(LN(z))", "式 2：z' = z + Attention(LN(z))", size=13)
    p.arrow(478, y, 570)
    p.text(524, y - 8, "z'", bold=True, size=15)
    p.box(574, y - 20, 84, 40, ORANGE, "norm2")
    p.arrow(662, y, 686)
    p.rect(690, y - 34, 232, 68, GREEN)
    p.box(700, y - 22, 62, 44, "white", "fc1")
    p.arrow(764, y, 776)
    p.text(802, y + 4, "GELU", size=12)
    p.arrow(826, y, 838)
    p.box(842, y - 22, 62, 44, "white", "fc2")
    p.text(
        806,
        y + 52,
        "MLP: each token by itself;  D → 4D → D",
        "MLP：每个 token 各算各的；D → 4D → D",
        size=11,
        color=SOFT,
    )
    p.arrow(926, y, 958)
    p.plus(972, y)
    p.path(f"M546 {y}V66H972V{y - 12}")
    p.text(778, 204, "eq. 3:  z'' = z' + MLP(LN(z'))", "式 3：z'' = z' + MLP(LN(z'))", size=13)
    p.arrow(984, y, 1034)
    p.text(1062, y - 6, "z''", bold=True, size=15)
    p.shape(1062, y + 14, "(N, D)")
    p.save("block")


def attention(language: int):
    p = Picture(1120, 330, language)
    p.text(560, 26, "Attention, one of h = 12 heads", "注意力：h = 12 个头中的一个", bold=True, size=15)
    p.rect(24, 100, 60, 140, BLUE)
    p.text(54, 176, "z", size=15, bold=True)
    p.shape(54, 258, "(N, D)")
    p.arrow(88, 170, 116)
    p.box(120, 130, 84, 80, GREEN, "U_qkv")
    p.shape(162, 228, "(D, 3d)")
    p.text(162, 304, "eq. 5", "式 5", size=12, color=SOFT)
    roles = (
        ("q", "what I look for", "我在找什么"),
        ("k", "what I offer", "我有什么可找"),
        ("v", "what I say", "我给出什么"),
    )
    for i, (name, *meaning) in enumerate(roles):
        y = 62 + i * 80
        p.arrow(208, 170, 250, y + 32)
        p.rect(256, y, 34, 64, BLUE)
        p.text(273, y + 38, name, size=15, bold=True)
        p.text(340, y + 30, *meaning, size=12)
        p.shape(340, y + 48, "(N, d)")
    p.path("M386 94C420 94 420 134 446 134")
    p.path("M386 174C420 174 420 140 446 140")
    p.box(450, 112, 96, 50, PURPLE, "q kᵀ / √d")
    p.arrow(550, 137, 572)
    p.box(576, 112, 84, 50, PURPLE, "softmax")
    p.arrow(664, 137, 686)
    rng = np.random.default_rng(3)
    weights = np.exp(1.2 * rng.normal(size=(8, 8)))
    weights /= weights.sum(axis=1, keepdims=True)
    for (row, column), weight in np.ndenumerate(weights):
        shade = 255 - int(210 * min(weight * 1.6, 1))
        p.rect(692 + column * 14, 81 + row * 14, 13, 13, f"#{shade:02x}{shade:02x}ff", 1)
    p.text(747, 68, "A", bold=True, size=15)
    p.shape(747, 212, "(N, N)")
    p.text(747, 230, "row: who looks, column: at whom", "行：谁在看，列：看谁", size=11, color=SOFT)
    p.text(747, 246, "each row sums to 1", "每行之和为 1", size=11, color=SOFT)
    p.text(600, 304, "eq. 6", "式 6", size=12, color=SOFT)
    p.arrow(810, 137, 846)
    p.box(850, 112, 62, 50, PURPLE, "A v")
    p.path("M386 254C420 254 430 274 470 274H820C860 274 881 240 881 168")
    p.text(881, 304, "eq. 7", "式 7", size=12, color=SOFT)
    p.shape(881, 104, "(N, d)")
    p.arrow(916, 137, 944)
    for offset in (16, 8, 0):
        p.rect(948 + offset, 92 - offset, 30, 90, BLUE, 2)
    p.text(972, 204, "12 heads", "12 个头", size=11, color=SOFT)
    p.text(972, 220, "side by side", "并排", size=11, color=SOFT)
    p.shape(972, 238, "(N, D)")
    p.arrow(1000, 137, 1022)
    p.box(1026, 112, 72, 50, GREEN, "U_msa")
    p.shape(1062, 180, "(D, D)")
    p.text(1062, 304, "eq. 8", "式 8", size=12, color=SOFT)
    p.arrow(1062, 108, 1062, 80)
    p.shape(1062, 70, "(N, D)")
    p.save("attention")


if __name__ == "__main__":
    for language in (0, 1):
        for draw in (architecture, block, attention):
            draw(language)
