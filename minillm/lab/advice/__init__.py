"""The decision guide: for a model, a machine and a load, which techniques pay? Computed, not read off a rule of thumb.

demand.py is what is asked and what it runs on, deployment.py what that costs at least, by the roofline; techniques.py
what each technique gains there, verdicts.py the form of an answer. decision_trees.py and engines.py stand beside it:
what the usual rules would say, and which engines suit the case. guide.py writes it all down.
"""
