"""Entry points of Megatron-LM and Megatron-Bridge."""
