"""What a trace says about chains: curves of hit ratios, simulations, searches."""
