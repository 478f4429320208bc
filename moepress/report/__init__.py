"""One HTML page for one output: what was pressed, what it cost, what it serves, and what nobody has looked at yet.

    output      everything that is known about the output, read from its folder
    sizes, memory, gates, served, reproduce     figures, each from the facts and nothing else
    drawing, charts                             inline SVG, in the colours of the page
    page                                        the figures and pictures, in the template

A part that was not run says so, with the command that would run it; a result of an earlier conversion is named as
stale and never shown.
"""
