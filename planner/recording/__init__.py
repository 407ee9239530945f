"""Recording: run one step on tensors without data and write down every allocation and every operator."""
