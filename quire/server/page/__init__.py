"""The page that `quire serve` shows in a browser. observer: what the core records while somebody looks. live: one
stream of it for all viewers. routes: the page's files, which are in `static`."""
