"""Watermarks, and nothing else.

A watermark W says *every event with event time < W is accounted for*. This folder holds all the
rules by which one comes about, as pure functions over immutable values: no I/O, no clock, no
framework. Read it in this order:

1. `timestamps`: a point in event time; -∞ and the end of time.
2. `ranges`: what must report. Key ranges that tile the key space, shards of a source.
3. `promises`: what a report comes down to.
4. `agreement`: what many promises come down to.
5. `graph`: how the watermark of one stage becomes the input of the next.

Why it is safe: an accepted promise stays true for ever, so the minimum over promises, joined
(maximum) over time, is a lower bound on every event still to come, in whatever order and by
however many replicas it is computed. Watermarks are a join-semilattice.
"""
