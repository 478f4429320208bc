"""How good a pressed model still is. `fidelity` compares it with its source on held-out text, layer by layer, at any size."""
