"""The rules of watermarks.

A watermark W states that *every event with event time < W is accounted for*. This folder has all the
rules that produce a watermark, as pure functions over immutable values: without I/O, clock or framework.
The order of reading:

1. `timestamps`: a point in event time; -∞ and the end of time.
2. `ranges`: the members that must report. Key ranges that tile the key space, shards of a source.
3. `promises`: the promise that a report contains.
4. `agreement`: the minimum of many promises.
5. `graph`: the propagation of one stage's watermark to the input of the next.
6. `estimate`: the instant when a watermark reaches a value, estimated from its history.

The rules are safe because an accepted promise stays true for ever. So the minimum over promises, joined
(maximum) over time, is a lower bound on all later events, in every order of computation and with any
number of replicas. Watermarks are a join-semilattice.
"""
