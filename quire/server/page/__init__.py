"""The page that `quire serve` shows in a browser. observer: records in the core while the page is open. live: one
stream of these records for all viewers. routes: the page's files, which are in `static`."""
