"""Which stream does what, and what orders them.

`current` sets and asks for current streams. The other rooms each name the events that order what they do.
"""
