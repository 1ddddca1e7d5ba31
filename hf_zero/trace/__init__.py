"""A timeline of a few steps: what every rank computed, sent and waited for, and when.

- `recorder`: changes the engine's classes for the steps that are recorded, so that at all other times nothing is paid for it.
- `timeline`: what was recorded, of all ranks; as a file that Perfetto and Chrome show.
- `report`: where the time went, in words.
- `picture`: the same as a picture.
"""
