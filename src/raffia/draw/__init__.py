"""Drawings out of text, lines and boxes: layouts of trees and graphs, SVG, and PNG by matplotlib.

Others describe what there is to see; where it stands and how it becomes a file is written here.
"""

from raffia.draw.clean_svg import clean_svg
from raffia.draw.layered import layered
from raffia.draw.layers import Box, Look
from raffia.draw.markup import Html, el, join
from raffia.draw.png import matplotlib_for
from raffia.draw.scene import Scene, path_data
from raffia.draw.shapes import Outline, Text, bent, polyline, rectangle, text_width
from raffia.draw.tidy import tidy

__all__ = [
    "Box",
    "Html",
    "Look",
    "Outline",
    "Scene",
    "Text",
    "bent",
    "clean_svg",
    "el",
    "join",
    "layered",
    "matplotlib_for",
    "path_data",
    "polyline",
    "rectangle",
    "text_width",
    "tidy",
]
