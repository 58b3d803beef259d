"""Texts and the room that they take."""

from raffia.draw.shapes import text_width


def test_wide_characters_take_two_columns():
    assert text_width("日本") == text_width("abcd")
