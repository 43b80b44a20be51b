"""Which stream does what, and what orders the streams.

`current` reads and sets current streams, and has events. The other rooms each name the events that order their work.
"""
