"""Changes to a model that make its keys and values easier to quantise: smoothing, folded into weights, and rotation."""
