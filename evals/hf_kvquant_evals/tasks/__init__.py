"""`hf-kvquant eval tasks`: zero-shot accuracy through lm-eval, each preset compared with the unquantised cache."""
