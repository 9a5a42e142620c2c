"""What a layer says about its solves: warnings, whether a solution is a minimum, the objective step by step."""
