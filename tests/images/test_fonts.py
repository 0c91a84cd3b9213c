"""Fonts for a text: matplotlib's own, and Chinese ones only where there is something else than ASCII to draw."""

from matplotlib import font_manager

from vitlab.images.fonts import families


def test_plain_text_needs_no_other_font():
    assert families("cat 1") == ["DejaVu Sans"]


def test_chinese_text_gets_what_is_installed_in_order(monkeypatch):
    monkeypatch.setattr(font_manager.fontManager, "get_font_names", lambda: ["SimHei", "Arial", "PingFang SC"])
    assert families("猫") == ["DejaVu Sans", "PingFang SC", "SimHei"]


def test_fonts_installed_since_are_found(monkeypatch):
    names, files = ["Arial"], ["/fonts/Arial.ttf", "/fonts/NotoSansCJK-Regular.ttc"]
    added = []

    def add(file):
        added.append(file)
        names.append("Noto Sans CJK JP")

    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: files)
    monkeypatch.setattr(font_manager.fontManager, "get_font_names", lambda: names)
    monkeypatch.setattr(font_manager.fontManager, "addfont", add)
    assert families("猫") == ["DejaVu Sans", "Noto Sans CJK JP"] and added == files[1:]
