"""The rules of watermarks.

A watermark W states that *every event with event time < W is accounted for*. This folder has all the
rules that produce one, as pure functions over immutable values: no I/O, no clock, no framework. Read it
in this order:

1. `timestamps`: a point in event time; -∞ and the end of time.
2. `ranges`: what must report. Key ranges that tile the key space, shards of a source.
3. `promises`: the promise that a report contains.
4. `agreement`: the minimum of many promises.
5. `graph`: how the watermark of one stage becomes the input of the next.
6. `estimate`: when a watermark will be somewhere, judged by where it was.

Why it is safe: an accepted promise stays true for ever, so the minimum over promises, joined
(maximum) over time, is a lower bound on every event still to come, in whatever order and by
however many replicas it is computed. Watermarks are a join-semilattice.
"""
