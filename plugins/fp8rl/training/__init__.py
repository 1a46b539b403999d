"""What FP8 trainers of every engine share: row orders, codes of weights, FP8 products."""
