"""What the node reaches, as a ratio to what the same machine allows in the same run.

``make bench`` measures every row. Absolute figures say little on a machine that others share, so
each row runs its subject and its limit in turns (A B A B ...), takes the median of each turn, and
reports the median of the turns' ratios with their spread.
"""
