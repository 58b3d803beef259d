"""Drawings out of text, lines and boxes: tidy trees, layers of boxes, SVG, and PNG.

Others describe what there is to see; where it stands and how it becomes a file is written here.
"""

from raffia.draw.layered import layered
from raffia.draw.layouts import tidy
from raffia.draw.scene import Scene

__all__ = ["Scene", "layered", "tidy"]
