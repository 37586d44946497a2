"""Time, memory and energy of the operators and of whole towers, against softmax and against what the machine allows."""
