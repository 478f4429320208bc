"""The pictures of the concept pages, drawn from code: plain SVG, and every number in them computed where they are drawn."""
