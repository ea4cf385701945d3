"""`quire top`. feed: a server's events or metrics. picture: the state derived from them. screen: its display in a
terminal.
"""
