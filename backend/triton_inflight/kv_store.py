"""The KV-state store: the tables of every live sequence, and the blocks they share.

One key (sequence ID, choice) goes through these calls; ``tokens`` is an int64 array of all its tokens::

    store = KVStore(num_blocks=256, tokens_per_block=32, reuse=True)
    computed = store.match_prefix(sequence, 0, tokens)           # keys and values that are already there
    copies = store.reserve(sequence, 0, computed, len(tokens))   # None: wait, pause somebody, or free
    # copy the blocks named by `copies`, then run the step over the rows' arrays
    cells, tables = store.layout(sequences, choices, starts, counts)
    store.publish(sequence, 0, tokens, len(tokens))              # its full blocks may serve other sequences
    store.free(sequence)                                         # once, whatever happened before

When ``reserve`` gives None after a prefix was matched, the key keeps the matched blocks until ``free``.
``help(KVStore)`` documents each call.
"""

from triton_inflight.native import _native

KVStore = _native.KVStore
