"""Heads: small trained networks that draft from the target's own hidden states.

How the pieces fit together in one draft of eagle, with shapes (T new tokens, H the hidden size, L layers read):

    target's hidden states [T, L * H] --fuse--> [T, H] --decoder layer(s)--> [., H] --norm, output--> logits [., V']
                                                  ^       |        ^
    embedding of the token after each [T, H] -----+       v        |
                                                     the head's cache

    cache entries:   | live: made of the target's states | drafted: made of the head's own outputs | free
                     0                                 live                         overwritten by the next round

Eagle drafts token by token and reads its own output where the target's next hidden state is not known yet. Block writes
one entry for each token that the target has read, and then fills the next K positions in one pass. Medusa has no
decoder layer and no cache: it guesses each place of a draft from the target's last hidden state.

shapes    the sizes of heads: `HeadShape` of those with decoder layers, `MedusaShape`
networks  the trained parts: `EagleHead`, `BlockHead`, `MedusaHead`, and rotary positions
files     reads and writes the weights of those trained here
formats, published_shape, published
          read published heads: EAGLE-3, DFlash, DSpark, and those of the library speculators
backends  `HeadBackend`: the layers and the cache of one text, by torch's operations, which may be captured on a GPU, or
          by the C library for CPUs
ready     `ReadyHead`: a head tied to its target; `HeadPasses`: what a drafter asks a backend for
drafter   `HeadDrafter`: follows the target's hidden states; `eagle`, `block` and `medusa` are its kinds
"""
