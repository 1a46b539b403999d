"""What is known of a model: the table of families, a model's description, its pins and folder."""
