"""Methods with an anchor: DP-SVRG, DP-C4 and DP-C4+."""
