"""KV-cache scales in a conversion: what can be handed over, what was measured, and where it goes.

plan          before measuring: emission, layers, names                     (configuration and contract only)
measure       a pass of the source model for layers that no calibrated run has measured
scales        measured, decided per layer, kept in the journal
fold          which weights carry a folded scale, and by what power of two  (arithmetic)
stored_folds  the same on stored numbers
"""
