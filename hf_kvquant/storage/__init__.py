"""Where codes are kept: the buffers of one layer, which rows tokens have, how many there are. Knows no transformers."""
