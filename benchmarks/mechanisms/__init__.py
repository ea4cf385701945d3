"""The measurements and plots of docs/mechanisms/, with a page for each mechanism of the engine."""
