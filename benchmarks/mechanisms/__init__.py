"""The measurements and plots of docs/mechanisms/, a page for each mechanism of the engine."""
