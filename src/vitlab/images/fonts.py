"""Fonts that matplotlib needs to draw a text with Chinese characters.

with rc_context({"font.family": families("猫 cat")}): ...
"""

from __future__ import annotations

import re
from pathlib import Path

# Names that matplotlib knows; of the Noto collections it knows the first face only, which is the Japanese one.
CHINESE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "Source Han Sans", "PingFang SC",
    "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "Noto Sans CJK JP", "Droid Sans Fallback", "Arial Unicode MS",
)  # fmt: skip


def families(text: str) -> list[str]:
    """matplotlib's own font, then installed Chinese fonts where the text needs them."""
    if text.isascii():
        return ["DejaVu Sans"]
    from matplotlib.font_manager import findSystemFonts, fontManager

    fonts = [name for name in CHINESE_FONTS if name in fontManager.get_font_names()]
    if not fonts:  # installed since matplotlib made its list?
        for file in findSystemFonts():
            if re.search(r"(?i)cjk|hansans|notosanssc|wqy|simhei|msyh|pingfang|hiragino", Path(file).name):
                fontManager.addfont(file)
        fonts = [name for name in CHINESE_FONTS if name in fontManager.get_font_names()]
    return ["DejaVu Sans", *fonts]
