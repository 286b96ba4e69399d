"""What codes mean: byte layouts, transforms of keys, and the reference that defines every number.

`codes` has the bytes of codes, `formats` what shares a scale and which row of a tail a dense token has, `planes` the
tensors of one side, `layout` both sides with their windows. `pages` and `tails` say how these lie in the memory of
continuous batching. `reference` computes codes and attention to them, with the transforms of `key_transform`.
`state_steps` and `state_chunks` are the references for layers with a state.
"""
