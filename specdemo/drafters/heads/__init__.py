"""Heads: small trained networks that draft from the target's own hidden states.

How the pieces fit together in one draft of eagle, with shapes (T new tokens, H the hidden size, L layers read):

    target's hidden states [T, L * H] --fuse--> [T, H] --decoder layer(s)--> [., H] --norm, output--> logits [., V']
                                                  ^       |        ^
    embedding of the token after each [T, H] -----+       v        |
                                                     the head's cache

    cache entries:   | live: made of the target's states | drafted: made of the head's own outputs | free
                     0                                 live                         overwritten by the next round

Eagle drafts token by token and reads its own output where the target's next hidden state is not known yet. Block writes
one entry for each token that the target has read, and then fills the next K positions in one pass. P-EAGLE does both in
the same pass. Medusa has no decoder layer and no cache: it guesses each place of a draft from the target's last hidden
state.

shapes    `HeadShape`: the sizes of heads with decoder layers
networks  their trained parts: `EagleHead`, `BlockHead`, and rotary positions
medusa, peagle
          all of Medusa, all of P-EAGLE
formats, published_shape, published
          what published heads are made of: EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark, Medusa, and those of the library
          speculators
files     reads published heads and those trained here, and writes the latter
backends  `HeadBackend`: the layers and the cache of one text, by torch's operations, which may be captured on a GPU, or
          by the C library for CPUs
ready     `ReadyHead`: a head tied to its target; `HeadPasses`: what a drafter asks a backend for
drafter   `HeadDrafter`: follows the target's hidden states; `eagle`, `p-eagle`, `block` and `medusa` are its kinds
"""
