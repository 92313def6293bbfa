"""Tables, plots and the page made from archived runs."""
