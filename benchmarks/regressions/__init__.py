"""How well regressions are found: real ones of 5% in one kernel, and none where nothing changed."""
