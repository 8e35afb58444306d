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
"""
