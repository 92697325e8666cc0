"""In-flight (continuous) batching for Hugging Face causal LMs on a stock Triton Inference Server."""
