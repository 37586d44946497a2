"""Trained models for programs without this package (torch.export, ONNX), and as folders for the Hugging Face hub."""
