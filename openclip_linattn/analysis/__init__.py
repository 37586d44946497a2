"""What attention does in a model: implied weights, walks over tokens, smoothing, maps and their faithfulness."""
