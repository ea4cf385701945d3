"""`quire top`. feed: a server's events or metrics. picture: what they tell. screen: how a terminal shows it."""
