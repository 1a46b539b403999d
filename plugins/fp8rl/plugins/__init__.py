"""Plugins: the hooks they may implement, and what finds and calls them."""
